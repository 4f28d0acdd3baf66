"""Mistakes that the tests have to notice: `make mutants` makes each of them in a copy of the tree, and runs its tests.

    python tests/mutants.py            all of them
    python tests/mutants.py plan cuh   those whose file or text has one of these words

A mutant is text that stands once in the product, what stands there instead, and the tests that fail with it. Text that
is gone or stands twice is an error, as a mutant that survives is: it has to be written anew where the code is now.
"""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "mutants"
_NOT_THE_PRODUCT = ("tests", "docs", "examples", "plots", ".ci", ".github")
_SUFFIXES = (".py", ".cuh")
_KILLED, _PASSED = 1, 0  # pytest's exit status


@dataclass(frozen=True)
class Mutant:
    """A mistake.

    Attributes:
        text: stands once in the product.
        instead: what replaces it.
        tests: paths below tests/, of which at least one test fails.
    """

    text: str
    instead: str
    tests: tuple[str, ...]


def mutant(text: str, instead: str, *tests: str) -> Mutant:
    return Mutant(text, instead, tests)


KERNELS = "TestKernelsGiveTheReferencesBits"
PER_GROUP, OUTLIER = "runtime/quantizers/test_per_group.py", "runtime/quantizers/test_outlier.py"
LAYERS, PLAN_SOLVER = "runtime/layers/test_layers.py", "runtime/plan/test_solver.py"
MUTANTS = (
    # ---- codes and random numbers
    mutant(
        "return (n + GROUP - 1) // GROUP * bits\n",
        "return (n // GROUP + 1) * bits\n",
        "runtime/tensors/test_packing.py",
    ),
    mutant(
        'np.packbits(mask.reshape(-1).numpy(), bitorder="little")',
        'np.packbits(mask.reshape(-1).numpy(), bitorder="big")',
        "runtime/tensors/test_packing.py",
    ),
    mutant(
        "(k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK",
        "(k0 + KEY_STEPS[1]) & MASK, (k1 + KEY_STEPS[0]) & MASK",
        "runtime/tensors/test_philox.py::test_published_vectors",
    ),
    mutant(
        "for half in (word & 0xFFFF, word >> 16)]",
        "for half in (word >> 16, word & 0xFFFF)]",
        "runtime/tensors/test_philox.py::test_halves_are_the_words_lowest_bits_first",
    ),
    mutant(
        "slopes = np.diff(codes) / (np.diff(at) * B)",
        "slopes = np.diff(codes) / (np.diff(at) * (B + 1))",
        "runtime/quantizers/test_levels.py::TestLines",
    ),
    # ---- plain torch, the oracle of the kernels
    mutant(
        "torch.where(is_plain.unsqueeze(2), h - Z.unsqueeze(2), 0)",
        "torch.where(is_plain.unsqueeze(2), h - h.amin(2, keepdim=True), 0)",
        f"{PER_GROUP}::{KERNELS}::test_of_any_tensor",
    ),
    mutant("ξ: int | Tensor = 1 << 15", "ξ: int | Tensor = 1 << 14", f"{PER_GROUP}::{KERNELS}::test_to_nearest"),
    mutant(
        "codes << 15 | r & 0x7FFF\n",
        "r & 0x7FFF\n",
        f"{PER_GROUP}::TestAnyTensor::test_constants_are_exact",
        f"{PER_GROUP}::{KERNELS}::test_of_constants_zeros_of_both_signs_and_the_ends_of_the_types",
    ),
    mutant(
        "torch.where(A > 0, code.maximum(zero), code.minimum(zero - 1))",
        "torch.where(A >= 0, code.maximum(zero), code.minimum(zero - 1))",
        "runtime/quantizers/test_fixed_point.py",
    ),
    mutant(
        "(equal.cumsum(0) <= k - above.sum())",
        "(equal.cumsum(0) < k - above.sum())",
        f"{OUTLIER}::{KERNELS}::test_of_equals_the_first_of_which_are_outliers",
    ),
    mutant(
        "        __syncwarp();  // a lane stores where its neighbour has read\n",
        "",
        "runtime/backends/cuda/test_races.py",
    ),
    mutant(
        "torch.where((values > 0) & (kept == 0), smallest(dtype), kept)",
        "kept",
        f"{OUTLIER}::TestPaper::test_codes_alone_tell_relus_gradient",
        f"{OUTLIER}::{KERNELS}::test_of_zeros_infinities_and_the_ends_of_the_types",
    ),
    mutant(
        "torch.searchsorted(t.boundaries, flat(x), right=False)",
        "torch.searchsorted(t.boundaries, flat(x), right=True)",
        "runtime/backends/test_activation.py",
    ),
    mutant(
        "torch.where(factors == 0, 0, flat(grad).to(factors.dtype) * factors)",
        "flat(grad).to(factors.dtype) * factors",
        "runtime/backends/test_activation.py::TestAgainstTheReference::test_a_level_of_zero_selects_zero",
    ),
    mutant(
        "- q[channel] * normal) * s[channel]",
        "+ q[channel] * normal) * s[channel]",
        "runtime/backends/test_preact.py::test_are_as_plain_torch",
    ),
    # ---- kernels of the CPU, and of CUDA as g++ builds them
    mutant(
        "found[i] = table[np.uint64(indices[i] - corners[i])]",
        "found[i] = table[np.uint64(indices[i] - corners[0])]",
        "runtime/test_layer_ops.py::test_pooling_is_plain_torchs",
    ),
    mutant(
        "most = np.float32(np.float32(top) * np.float32(65536))",
        "most = np.float32(np.float32(top) * np.float32(65000))",
        "runtime/backends/test_rounding.py::test_codes_are_those_of_plain_torch",
    ),
    mutant(
        "const u32 minimum = (pattern >> 16) + (low < 0 && (pattern & 0xffff) != 0);",
        "const u32 minimum = (pattern >> 16) + (low < 0);",
        f"{PER_GROUP}::{KERNELS}",
    ),
    mutant(
        ": u32(int(inside))) + random.half(i);",
        ": u32(int(inside))) + random.half(7 - i);",
        "runtime/backends/test_rounding.py",
    ),
    mutant(
        "result[i] = __fmul_rn(dy[i], a[i]);",
        "result[i] = __fmul_rn(dy[i], u[i]);",
        "runtime/test_glu_ops.py::test_kernels_give_the_references_bits",
    ),
    # ---- savers and layers
    mutant(
        "x.stride(), x.dtype, x._version), StorageWeakRef(storage)",
        "x.stride(), x.dtype), StorageWeakRef(storage)",
        "runtime/layers/test_saver.py",
    ),
    mutant(
        "return compressed if compressed.nbytes < total_bytes([x]) else Whole(x)",
        "return compressed",
        "runtime/layers/test_saver.py",
    ),
    mutant(
        "compressed = Whole(x) if is_held(x) else super()",
        "compressed = super()",
        "runtime/layers/test_callers.py",
    ),
    mutant(
        "momentum = 1.0 / float(self.num_batches_tracked)",
        "momentum = 1.0 / float(self.num_batches_tracked + 1)",
        f"{LAYERS}::test_the_output_and_the_statistics_are_torchs_bit_for_bit",
    ),
    mutant(
        "few = training and x.numel() < FEWEST * x.shape[1]",
        "few = training and x.numel() <= FEWEST * x.shape[1]",
        f"{LAYERS}::test_batch_normalization_over_few_elements_keeps_its_input",
    ),
    mutant("np.array([0, 1 / (1 - p)])", "np.array([0, 1 + p])", "runtime/layers/test_exact_layers.py"),
    mutant("if progress.asked == progress.layers:", "if progress.asked > 0:", "runtime/layers/test_offload_shared.py"),
    # ---- the compiler of tables
    mutant(
        "cost = f2 - fw * fw / w if w > 0.0 else 0.0",
        "cost = f2 - fw * fw / (w + 1e-3) if w > 0.0 else 0.0",
        "fewbit_gen/test_interval.py",
    ),
    mutant(
        "cost = (a + b) * dfw - a * b * dw - df2",
        "cost = (a + b) * dfw - b * b * dw - df2",
        "fewbit_gen/test_stochastic.py::test_cuts_are_as_good_as_trying_all_levels",
    ),
    mutant(
        "lost = (np.abs(level) * np.sqrt(mass) + np.sqrt(np.maximum(square, 0.0))) ** 2",
        "lost = 0 * mass",
        "fewbit_gen/test_moments.py",
    ),
    mutant(
        "(table.boundaries > low) & (table.boundaries < high)",
        "(table.boundaries > low) & (table.boundaries < 0)",
        "fewbit_gen/test_certify.py",
    ),
    mutant(
        "np.stack([mass.sum(axis=1), (g * mass).sum(axis=1)",
        "np.stack([mass.sum(axis=1), (abs(g) * mass).sum(axis=1)",
        "fewbit_gen/test_moments.py",
    ),
    # ---- tables and proofs
    mutant(
        "np.any(boundaries[1:] <= boundaries[:-1])",
        "np.any(boundaries[1:] < boundaries[:-1])",
        "tables/test_table.py::TestValidation",
    ),
    mutant("(self.levels.size - 1).bit_length()", "self.levels.size.bit_length()", "tables/test_table.py"),
    mutant(
        "if not (least <= points[0] >= levels[0] and most >= points[-1] <= levels[-1]):",
        "if False:",
        "proofs/test_checker.py::test_values_of_the_derivative_that_do_not_reach_the_line_are_refused",
    ),
    # ---- allocation and the plan
    mutant("if ratio > best:  # ties", "if ratio >= best:  # ties", "runtime/allocation/test_allocate.py"),
    mutant("change[hold.end] -= hold.nbytes", "change[hold.end - 1] -= hold.nbytes", PLAN_SOLVER),
    mutant("1 + 0.5 / unit - tolerance - base", "1.2 + 0.5 / unit - tolerance - base", PLAN_SOLVER),
    mutant("_in_units(limits.error**2,", "_in_units(limits.error,", PLAN_SOLVER),
    mutant("_in_units((limits.time - 1) * problem.seconds,", "_in_units(limits.time * problem.seconds,", PLAN_SOLVER),
)


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(word in f"{place(m)} {m.text}" for word in words)]
    copy_the_tree()
    selected = sorted({test for m in chosen for test in m.tests})
    if run(selected) != _PASSED:
        print("these tests fail before any mistake is made: no mutant was tried")
        return 1
    wrong = 0
    for number, m in enumerate(chosen, 1):
        start = time.perf_counter()
        outcome = try_out(m)
        wrong += outcome != "killed"
        took = f"{number:3} of {len(chosen)} {time.perf_counter() - start:5.0f} s"
        print(f"{took}  {outcome:9}  {place(m)}: {m.text.strip()}", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} killed")
    return bool(wrong)


def place(m: Mutant) -> str:
    """The file in which the text of a mutant stands, below the root; what is wrong if it does not stand once."""
    found = [path for path in product(ROOT) for _ in range(path.read_text(encoding="utf-8").count(m.text))]
    return str(found[0].relative_to(ROOT)) if len(found) == 1 else f"stands {len(found)} times, not once"


def product(root: Path) -> list[Path]:
    """The files of the product: code in Python and CUDA."""
    folders = [path for path in root.iterdir() if path.is_dir() and (path / "__init__.py").exists()]
    return [
        path
        for folder in folders
        if folder.name not in _NOT_THE_PRODUCT
        for path in folder.rglob("*")
        if path.suffix in _SUFFIXES
    ]


def copy_the_tree() -> None:
    """Copy what git lists, changed or not, to `COPY`, whose compiled kernels stay from one time to the next."""
    listed = ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, capture_output=True, check=True, text=True).stdout.split("\0")[:-1]
    for old in COPY.iterdir() if COPY.is_dir() else ():
        if old.name != "build":
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    for name in names:
        if (ROOT / name).is_file():
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, COPY / name)
    (COPY / "build" / "path").mkdir(parents=True, exist_ok=True)
    package = COPY / "build" / "path" / "fewbit"
    if not package.is_symlink():
        package.symlink_to(Path("..", ".."))


def run(tests: list[str] | tuple[str, ...]) -> int:
    """Run tests of the copy up to the first that fails; return pytest's exit status."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(COPY / "build" / "path"),
        "NUMBA_CACHE_DIR": str(COPY / "build" / "numba"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-c", "tests/pytest.ini", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-m", "not deep"]  # what `make test` runs
    command += [f"tests/{test}" for test in tests]
    done = subprocess.run(command, cwd=COPY, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (_PASSED, _KILLED):
        print(done.stdout[-2000:], done.stderr[-2000:])
    return done.returncode


def try_out(m: Mutant) -> str:
    """Make the mistake, run its tests, and put the file back; return what came of it."""
    file = COPY / place(m)
    if not file.is_file():
        return "ERROR"
    before = file.read_text(encoding="utf-8")
    file.write_text(before.replace(m.text, m.instead), encoding="utf-8")
    try:
        return {_KILLED: "killed", _PASSED: "SURVIVED"}.get(run(m.tests), "ERROR")
    finally:
        file.write_text(before, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
