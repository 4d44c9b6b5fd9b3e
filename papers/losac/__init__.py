"""LoSAC: the experiments of Table 2 (MNIST) and Figure 2, and a comparison with tuned learning rates."""
