"""Methods and options that are compared with the NumPy reference."""

from tests.algorithms.problems import Case

EPOCHS = {"lr": 0.1, "epochs": 2, "batch_size": 3}
STEPS = {"lr": 0.1, "steps": 5, "batch_size": 4}
FULL = {"lr": 0.1, "steps": 3, "batch_size": "full"}
BLOCKS = {"lr": 0.02, "steps": 5, "blocks": 3}
ALL_LOCAL_OPTIONS = {
    **STEPS,
    "momentum": 0.7,
    "weight_decay": 0.05,
    "clip": 0.15,
    "prox": ("L1", {"weight": 0.05}),
    "schedule": ("ExponentialDecay", {"factor": 0.8}),
}
"""All options of local steps at once."""

METHODS = {
    case.name: case
    for case in (
        Case("FedSGD", {"local": FULL | {"weight_decay": 0.1}, "server_optimizer": ("SGD", {"lr": 0.3})}),
        Case("FedAvg", {"local": EPOCHS}, weights="samples"),
        Case("FedAvg", {"local": ALL_LOCAL_OPTIONS}, note="all-options"),
        Case("FedProx", {"local": EPOCHS, "mu": 0.7}, weights="samples"),
        Case("Scaffold", {"local": EPOCHS}),
        Case("Scaffold", {"local": STEPS | {"clip": 0.1}, "option": "I"}, note="I-clipped"),
        Case("Scaffold", {"local": ALL_LOCAL_OPTIONS}, note="all-options"),
        Case("FedSaga", {"local": BLOCKS}, weights="samples"),
        Case("LoSAC", {"local": BLOCKS | {"reduction": "sum"}, "reading": "printed"}, note="printed"),
        Case("LoSAC", {"local": BLOCKS, "reading": "consistent"}, varying_cohorts=True, note="consistent"),
        Case("MimeSVRG", {"local": EPOCHS}, weights="samples"),
        Case("Mime", {"local": EPOCHS, "beta": 0.6}, weights="samples"),
        Case("MimeLite", {"local": EPOCHS, "beta": 0.6}, varying_cohorts=True),
        Case("FedCM", {"local": EPOCHS, "alpha": 0.3}, weights="samples", stragglers=0.6),
        Case("FedADMM", {"local": EPOCHS, "rho": 2.0}, varying_cohorts=True),
        Case("Episode", {"local": EPOCHS, "gamma": 0.04}, weights="samples"),
        Case("NaiveParallelClip", {"local": STEPS | {"clip": 0.03}}, weights="samples"),
        Case("MIFA", {"local": EPOCHS}, varying_cohorts=True),
        Case("MIFA", {"local": EPOCHS, "memory": "server"}, varying_cohorts=True, note="server"),
        Case("FedDyn", {"local": EPOCHS, "alpha": 0.4}, varying_cohorts=True),
        Case("FedNova", {"local": EPOCHS}, weights="samples", stragglers=0.6),
        Case("PFedMe", {"local": EPOCHS, "lam": 4.0}, weights="samples"),
        Case("GradMAW", {"local": EPOCHS}, weights="samples"),
        Case("GradMAS", {"local": EPOCHS, "memory": 4, "beta1": 0.6, "beta2": 0.7}, weights="samples", rounds=6),
        Case("GradMA", {"local": EPOCHS, "previous": "local", "memory": 5}, varying_cohorts=True, rounds=6),
        Case(
            "Upcycled",
            {"inner": ("Scaffold", {"local": EPOCHS}), "a": 0.4, "extrapolate": "both"},
            note="scaffold-both",
        ),
    )
}
"""One case for each method, also for the comparison of execution plans."""

COIN_STEPS = {"lr": 0.1, "batch_size": 4}
"""Local steps until a coin toss ends the round."""
_FEDAVG = ("FedAvg", {"local": EPOCHS})

METHODS |= {
    case.name: case
    for case in (
        Case("FedBuff", {"local": EPOCHS, "max_delay": 3}, max_staleness=2, rounds=6),
        Case("FedExP", {"local": EPOCHS, "epsilon": 1e-4}, weights="samples"),
        Case("FedLion", {"local": EPOCHS, "beta1": 0.6, "beta2": 0.8}, weights="samples", stragglers=0.6),
        Case("QFedAvg", {"local": EPOCHS, "q": 1.7}, weights="samples"),
        Case("Scaffnew", {"local": COIN_STEPS, "p": 0.3}, varying_cohorts=True, coin=0.3),
        Case("SignSGD", {"local": {"lr": 0.05, "steps": 1, "batch_size": 4}, "beta": 0.6}, varying_cohorts=True),
        Case("Ditto", {"inner": ("FedAvg", {"local": EPOCHS}), "lam": 0.6}, weights="samples"),
        Case(
            "Attacked",
            {"inner": ("Robust", {"inner": _FEDAVG, "rule": ("Krum", {"keep": 2})}), "attack": ("ALittle", {})}
            | {"clients": (2, 3)},
            varying_cohorts=True,
            note="krum-alittle",
        ),
    )
}


def _local(note: str, options: dict, method: str = "FedAvg", **more: object) -> Case:
    return Case(method, {"local": options}, note=note, **more)  # type: ignore[arg-type]


LOCAL_WORK = [
    _local("equal sizes, ragged", EPOCHS | {"batch_size": 4}, sizes="equal"),
    _local("equal sizes, whole", EPOCHS, sizes="equal"),
    _local("whole batches, sizes differ", EPOCHS, sizes="multiples"),
    _local("steps beyond an epoch", STEPS | {"steps": 9}),
    _local("batches larger than all clients", STEPS | {"batch_size": 100}),
    _local("full", FULL),
    _local("full, equal sizes", FULL, sizes="equal"),
    _local("long passes", FULL | {"steps": 2}, sizes=(300, 5, 129, 128, 17, 40, 257)),
    _local("blocks", BLOCKS),
    _local("blocks, equal sizes", BLOCKS, sizes="equal"),
    _local("blocks that do not divide equal sizes", BLOCKS | {"blocks": 4}, sizes="equal"),
    _local("sum", EPOCHS | {"reduction": "sum", "lr": 0.02}),
    _local("momentum and decay", EPOCHS | {"momentum": 0.9, "weight_decay": 0.2}),
    _local("clip, StepDecay", EPOCHS | {"clip": 0.1, "schedule": ("StepDecay", {"factor": 0.5, "milestones": (1, 3)})}),
    _local("InverseTimeDecay", EPOCHS | {"schedule": ("InverseTimeDecay", {"rate": 0.5})}),
    _local("CosineDecay", EPOCHS | {"schedule": ("CosineDecay", {"rounds": 3, "final": 0.1})}),
    _local("ElasticNet", EPOCHS | {"prox": ("ElasticNet", {"l1": 0.05, "l2": 0.3})}),
    _local("NuclearNorm", EPOCHS | {"prox": ("NuclearNorm", {"weight": 0.2})}),
    _local("Box", EPOCHS | {"prox": ("Box", {"low": -0.2, "high": 0.3})}),
    _local("clip and prox", EPOCHS | {"clip": 0.05, "prox": ("L1", {"weight": 0.3})}),
    _local("stragglers, epochs", EPOCHS | {"epochs": 4}, stragglers=0.6),
    _local("stragglers, steps", STEPS, stragglers=0.5, weights="samples"),
    _local("varying cohorts", EPOCHS, varying_cohorts=True, weights="samples"),
]

SERVER_RULES = [
    Case("FedAvg", {"local": STEPS, "server_optimizer": rule}, note=f"{rule[0]} {i}")
    for i, rule in enumerate(
        (
            ("SGD", {"lr": 0.7}),
            ("SGD", {"lr": 0.7, "momentum": 0.9}),
            ("SGD", {"lr": 0.7, "schedule": ("ExponentialDecay", {"factor": 0.5})}),
            ("Adagrad", {"lr": 0.1, "b1": 0.5, "tau": 0.1}),
            ("Adam", {"lr": 0.05, "b1": 0.8, "b2": 0.9, "tau": 0.01}),
            (
                "Yogi",
                {"lr": 0.05, "b1": 0.8, "tau": 1e-3, "schedule": ("StepDecay", {"factor": 0.1, "milestones": (2,)})},
            ),
        )
    )
]


def _case(method: str, note: str, local: dict, options: dict | None = None, **more: object) -> Case:
    return Case(method, {"local": local, **(options or {})}, note=note, **more)  # type: ignore[arg-type]


_L1 = {"prox": ("L1", {"weight": 0.1})}
_HALVED = ("ExponentialDecay", {"factor": 0.5})

OPTIONS = [
    _case("FedSGD", "sum, Adam", FULL | {"reduction": "sum"}, {"server_optimizer": ("Adam", {"lr": 0.05})}),
    _case("FedProx", "all-options", ALL_LOCAL_OPTIONS, {"mu": 0.5}),
    _case("Scaffold", "I sum", EPOCHS | {"reduction": "sum", "lr": 0.02}, {"option": "I"}),
    _case("Scaffold", "server step", STEPS, {"server_optimizer": ("SGD", {"lr": 0.5, "momentum": 0.5})}),
    _case("Scaffold", "clip", STEPS | {"clip": 0.1}),
    _case("Scaffold", "prox", STEPS | {"prox": ("NuclearNorm", {"weight": 0.2})}),
    _case("Scaffold", "prox I", STEPS | _L1, {"option": "I"}),
    _case("Scaffold", "stragglers", EPOCHS, stragglers=0.6),
    _case("Scaffold", "varying cohorts", EPOCHS, varying_cohorts=True),
    _case("FedSaga", "sum", BLOCKS | {"reduction": "sum"}),
    _case(
        "FedSaga",
        "decay, server rule",
        BLOCKS | {"weight_decay": 0.1},
        {"server_optimizer": ("SGD", {"lr": 0.5, "momentum": 0.5})},
    ),
    _case("LoSAC", "printed equal", BLOCKS, {"reading": "printed"}, sizes="equal"),
    _case("LoSAC", "consistent sum", BLOCKS | {"reduction": "sum"}, {"reading": "consistent"}),
    _case("LoSAC", "prox printed", BLOCKS | _L1, {"reading": "printed"}),
    _case("LoSAC", "prox consistent", BLOCKS | _L1 | {"lr": 0.1}, {"reading": "consistent"}, sizes="equal"),
    _case(
        "LoSAC",
        "decay, schedule, stragglers",
        BLOCKS | {"weight_decay": 0.2, "schedule": ("InverseTimeDecay", {"rate": 0.5})},
        {"reading": "consistent"},
        stragglers=0.5,
    ),
    _case("LoSAC", "more blocks than samples", BLOCKS | {"blocks": 5}, {"reading": "printed"}),
    _case("MimeSVRG", "full, equal", FULL, sizes="equal"),
    _case("MimeSVRG", "all-options", ALL_LOCAL_OPTIONS),
    _case(
        "MimeSVRG",
        "sum, server rule",
        STEPS | {"reduction": "sum", "lr": 0.02},
        {"server_optimizer": ("Adagrad", {"lr": 0.1})},
    ),
    _case("Mime", "all-options", ALL_LOCAL_OPTIONS, {"server_optimizer": ("SGD", {"lr": 0.5, "momentum": 0.5})}),
    _case(
        "MimeLite",
        "all options, sum",
        ALL_LOCAL_OPTIONS | {"reduction": "sum", "lr": 0.02},
        {"beta": 0.5},
        weights="samples",
    ),
    _case(
        "FedCM",
        "all-options",
        ALL_LOCAL_OPTIONS,
        {"server_optimizer": ("SGD", {"lr": 0.5, "momentum": 0.5})},
        varying_cohorts=True,
    ),
    _case("FedCM", "no step at all", STEPS | {"schedule": ("CosineDecay", {"rounds": 2, "final": 0.0})}),
    _case(
        "FedADMM",
        "decay, schedule, prox, stragglers",
        STEPS | {"weight_decay": 0.2, "schedule": ("InverseTimeDecay", {"rate": 0.5})},
        {"rho": 3.0, "prox": ("L1", {"weight": 0.1})},
        stragglers=0.5,
    ),
    _case(
        "FedADMM",
        "low rank, many server steps",
        BLOCKS,
        {"rho": 1.5, "prox": ("NuclearNorm", {"weight": 0.1}), "server_steps": 4, "server_lr": 0.03},
    ),
    _case("Episode", "unclipped", EPOCHS),
    _case("Episode", "clipped always", STEPS, {"gamma": 1e-3}),
    _case(
        "Episode",
        "momentum, prox, schedule",
        STEPS | _L1 | {"momentum": 0.7, "schedule": ("ExponentialDecay", {"factor": 0.6})},
        {"gamma": 0.05},
    ),
    _case("Episode", "full", FULL, {"gamma": 0.05}),
    _case("Episode", "decay", EPOCHS | {"weight_decay": 2.0}, {"gamma": 0.1}),
    _case("NaiveParallelClip", "unclipped", STEPS),
    _case(
        "NaiveParallelClip",
        "decay, prox, schedule",
        STEPS | _L1 | {"clip": 0.04, "weight_decay": 0.1, "schedule": ("ExponentialDecay", {"factor": 0.6})},
    ),
    _case("MIFA", "server rule", ALL_LOCAL_OPTIONS, {"server_optimizer": ("SGD", {"lr": 0.5, "momentum": 0.5})}),
    _case("FedDyn", "all-options", ALL_LOCAL_OPTIONS, {"alpha": 0.6}),
    _case("FedDyn", "full, stragglers", FULL, {"alpha": 1.0}, stragglers=0.5),
    _case("FedDyn", "sum, blocks", BLOCKS | {"reduction": "sum"}, {"alpha": 2.0}, varying_cohorts=True),
    _case("FedNova", "momentum", EPOCHS | {"momentum": 0.8}, stragglers=0.6),
    _case("FedNova", "momentum of zero", EPOCHS | {"momentum": 0.0}, varying_cohorts=True),
    _case("FedNova", "proximal", EPOCHS, {"mu": 0.9}, weights="samples", stragglers=0.6),
    _case(
        "FedNova",
        "proximal, schedule, server rule",
        EPOCHS | {"epochs": 4, "schedule": ("CosineDecay", {"rounds": 3, "final": 0.1})},
        {"mu": 0.3, "server_optimizer": ("SGD", {"lr": 0.7, "momentum": 0.5})},
    ),
    _case("FedNova", "sum", EPOCHS | {"reduction": "sum", "lr": 0.02}, weights="samples"),
    _case("PFedMe", "restart", EPOCHS, {"lam": 4.0, "restart": True}, varying_cohorts=True),
    _case("PFedMe", "stragglers, beta", EPOCHS, {"lam": 3.0, "server_optimizer": ("SGD", {"lr": 1.5})}, stragglers=0.6),
    _case("PFedMe", "full, three steps", FULL, {"lam": 2.0, "inner_steps": 3, "inner_lr": 0.2}, sizes="equal"),
    _case(
        "PFedMe",
        "clip, decay, prox, schedule",
        STEPS
        | {"clip": 0.05, "weight_decay": 0.1, "prox": ("L1", {"weight": 0.05})}
        | {"schedule": ("ExponentialDecay", {"factor": 0.8})},
        {"lam": 4.0},
    ),
    _case("GradMAW", "leaf", EPOCHS, {"scope": "leaf"}),
    _case("GradMAW", "local", EPOCHS, {"previous": "local"}, varying_cohorts=True, rounds=6),
    _case("GradMAW", "full, equal", FULL, sizes="equal"),
    _case(
        "GradMAW", "all-options", ALL_LOCAL_OPTIONS, {"previous": "local", "scope": "leaf"}, weights="samples", rounds=6
    ),
    _case("GradMAW", "blocks, stragglers", BLOCKS, stragglers=0.5),
    _case(
        "GradMAW",
        "sum, server rule",
        STEPS | {"reduction": "sum", "lr": 0.02},
        {"server_optimizer": ("Adam", {"lr": 0.05})},
    ),
    _case("GradMAS", "room for all", EPOCHS, {"server_lr": 0.7}, varying_cohorts=True, rounds=6),
    _case("GradMAS", "leaf", EPOCHS, {"scope": "leaf", "memory": 5}, rounds=6),
    _case("GradMAS", "no memory", EPOCHS, {"memory": 0, "beta1": 0.9, "server_lr": 0.5}, weights="samples"),
    _case("GradMAS", "forgetting at once", EPOCHS, {"beta2": 0.0}, varying_cohorts=True, rounds=6),
    _case(
        "GradMAS", "no momentum", ALL_LOCAL_OPTIONS, {"beta1": 0.0}, varying_cohorts=True, weights="samples", rounds=6
    ),
    _case("GradMA", "all options, leaf", ALL_LOCAL_OPTIONS, {"scope": "leaf", "memory": 4, "server_lr": 0.8}, rounds=6),
    _case("GradMA", "full", FULL, {"beta1": 0.9, "beta2": 0.9}, weights="samples", stragglers=0.5, rounds=6),
    _case("GradMA", "no memory", EPOCHS, {"memory": 0, "beta1": 0.3, "previous": "local"}),
    Case("Upcycled", {"inner": ("FedAvg", {"local": EPOCHS}), "a": 0.4}, note="fedavg"),
    Case(
        "Upcycled",
        {"inner": ("FedProx", {"local": EPOCHS, "mu": 0.7}), "a": 0.4, "schedule": ("InverseTimeDecay", {"rate": 0.5})},
        note="fedprox",
    ),
    Case(
        "Upcycled",
        {
            "inner": ("Scaffold", {"local": EPOCHS}),
            "a": 0.4,
            "schedule": ("InverseTimeDecay", {"rate": 0.5}),
            "extrapolate": "server",
        },
        note="scaffold server",
    ),
    Case(
        "Upcycled",
        {"inner": ("FedDyn", {"local": EPOCHS, "alpha": 0.4}), "a": 0.3, "extrapolate": "both"},
        varying_cohorts=True,
        note="feddyn both",
    ),
    Case(
        "Upcycled",
        {"inner": ("Episode", {"local": EPOCHS, "gamma": 0.04}), "a": 0.4, "extrapolate": "both"},
        note="episode",
    ),
]

OPTIONS += [
    _case(
        "FedBuff",
        "all options, server rule",
        ALL_LOCAL_OPTIONS,
        {"power": 1.2, "max_delay": 4, "server_optimizer": ("SGD", {"lr": 0.5, "momentum": 0.5})},
        max_staleness=4,
        varying_cohorts=True,
        rounds=6,
    ),
    _case("FedExP", "all-options", ALL_LOCAL_OPTIONS),
    _case("FedLion", "blocks, schedule", BLOCKS | {"schedule": _HALVED}, varying_cohorts=True),
    _case(
        "QFedAvg",
        "below one, all options, server rule",
        ALL_LOCAL_OPTIONS,
        {"q": 0.4, "server_optimizer": ("SGD", {"lr": 0.7})},
    ),
    _case("Scaffnew", "full, schedule", COIN_STEPS | {"batch_size": "full", "schedule": _HALVED}, {"p": 0.5}, coin=0.5),
    _case("SignSGD", "decay, schedule", {"lr": 0.1, "steps": 1} | {"weight_decay": 0.3, "schedule": _HALVED}),
    Case(
        "Ditto",
        {"inner": ("FedProx", {"local": ALL_LOCAL_OPTIONS, "mu": 0.5}), "lam": 2.0},
        note="all-options",
        stragglers=0.5,
    ),
    *(
        Case("Robust", {"inner": _FEDAVG, "rule": rule}, weights=weights, varying_cohorts=True, note=rule[0])
        for rule, weights in (
            (("Median", {}), "uniform"),
            (("TrimmedMean", {"trim": 0.25}), "uniform"),
            (("NormBound", {"bound": 0.3}), "samples"),
            (("GeometricMedian", {"iterations": 5}), "samples"),
        )
    ),
    Case("Attacked", {"inner": _FEDAVG, "attack": ("Scaling", {"factor": -2.5}), "clients": (0, 2)}, note="scaling"),
    Case("Attacked", {"inner": _FEDAVG, "attack": ("LabelFlip", {"classes": 3}), "clients": (2, 4)}, note="labels"),
    Case("EFSign", {"inner": _FEDAVG}, weights="samples"),
    Case("QuantizedBroadcast", {"inner": _FEDAVG, "bits": 8}, varying_cohorts=True),
]
