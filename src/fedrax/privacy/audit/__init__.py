"""Privacy audits: the distinguishing game and the lower bounds on epsilon that its results prove."""
