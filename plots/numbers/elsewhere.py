"""Numbers in tables that no text of `SOURCES` makes of a file: where they come from."""

# Files by page and mark, of what other code prints and another test holds to its file.
PRINTED = {
    "README.md#alternatives": ("alternatives-cpu.json",),
    "docs/guide.md#alternatives": ("alternatives-cpu.json",),
    "docs/numerics.md#roles": ("roles.json",),
    "plots/results/gpu.md#checks": ("gpu-1.json",),
    "plots/results/gpu.md#tests": ("gpu-2.json",),
    "plots/results/gpu.md#kernels": ("gpu-3.json",),
    "plots/results/gpu.md#trainings": ("gpu-4.json",),
}

_COMMAND = "settings of a command, and versions"
_ONCE = "measured once, in no file: "
_TEXT = "no measurement: "

# Reasons by page and heading.
ELSEWHERE = {
    ("README.md", "What to type"): _TEXT + "bits asked for",
    (
        "README.md",
        "Ways to use it",
    ): "planner-estimated.json, as in docs/planning/measured.md, and least memories that a refusal printed",
    ("docs/compile.md", "Options"): _TEXT + "defaults",
    ("docs/compiler/calibration.md", "Calibration: the best tables for one model"): _ONCE
    + "fewbit calibrate --demo --bits",
    ("docs/compiler/index.md", "Errors of the shipped tables"): "the shipped tables: tests/plots/numbers",
    ("docs/compiler/index.md", "Speed"): _ONCE + "fewbit bench solve, with the rivals' packages installed",
    (
        "docs/gpu.md",
        "What machine code allows",
    ): "make kernels: compiled for three GPUs, which needs cuobjdump and no GPU",
    ("docs/guide.md", "LoRA"): _ONCE + "bitsandbytes on the CPU",
    ("docs/index.md", "Install"): _TEXT + "versions",
    ("docs/inside/tests.md", "The slowest"): _TEXT + "sizes of tests",
    ("docs/inside.md", "One tensor, from the forward pass to its gradient"): _TEXT + "bits, by definition",
    ("docs/methods/actnn.md", "ActNN, L1 to L5"): _ONCE + "models of make zoo, whose rows have other bits",
    ("docs/methods/gated-mlps.md", "Gated MLPs"): _TEXT + "bits, and bytes by formula",
    ("docs/methods/index.md", "Methods"): _TEXT + "bits, and bytes by formula",
    (
        "plots/results/actnn.md",
        "Levels where the values of a group lie (`group-levels.json`)",
    ): "group-levels.json, by kind of layer; what levels gain for normal numbers is computed",
    ("docs/planning/measured.md", "Eager"): "planner.json: the rows of errors",
    ("docs/planning/measured.md", "Estimated"): "planner-estimated.json",
    ("docs/torch.md", "Releases"): _TEXT + "versions",
    ("plots/results/README.md", "Results of real runs"): "the page that the row links: tests/plots/numbers",
    (
        "plots/results/alternatives.md",
        "*",
    ): "alternatives-cpu.json, and that of 25 November on two threads, at commit 24450fd",
    ("plots/results/blpa.md", "*"): _ONCE + "fewbit bench preact, in several runs",
    ("plots/results/compiled.md", "*"): _ONCE + "fewbit bench compiled --peak, and single trainings of the first day",
    ("plots/results/coverage.md", "*"): "the papers', and pages that the row links",
    ("plots/results/gpu.md", "The other benches"): _TEXT + "bars",
    ("plots/results/hooks.md", "*"): "tests/runtime/test_saved_exactly.py, whose tests hold the ratio to L2",
    ("plots/results/largest.md", "*"): "the paper's, and times of one run",
    ("plots/results/vquant.md", "*"): "outliers-cpu.json for one thread; the others were measured once",
    ("plots/results/vquant_rescue.md", "*"): "the paper's",
    (
        "plots/results/tables.md",
        "Tables that follow the training (`adaptation.json`, `adaptation.png`)",
    ): "adaptation.json: the worst activation and step",
    ("plots/results/zoo.md", "The rows"): "zoo.json: tests/plots/numbers",
    ("plots/results/zoo_wide.md", "The rows"): "zoo_wide.json: tests/plots/numbers",
    **{("*", heading): _COMMAND for heading in ("Made by",)},
}


def reason(page: str, heading: str) -> str:
    """Return where numbers in a table of a page come from, "" if nobody said."""
    keys = ((page, heading), (page, "*"), ("*", heading))
    return next((ELSEWHERE[key] for key in keys if key in ELSEWHERE), "")
