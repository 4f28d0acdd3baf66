"""What is counted in machine code: of a listing as cuobjdump writes it. No compiler, no GPU."""

import json

import pytest
from fewbit.plots.bench import instructions
from fewbit.plots.bench.machine_code import loops, main_path, read_kernels

# A loop around a loop: in the inner one a way for memory that is aligned, one for other, longer, and a call that is
# rare; behind the end, code that comes back.
LISTING = """
		Function : quantize
        /*0000*/                   MOV R1, c[0x0][0x28] ;    /* 0x00000a0000017a02 */
        /*0010*/                   IADD3 R0, R0, 0x1, RZ ;
        /*0020*/              @!P0 BRA 0x60 ;
        /*0030*/                   LDG.E.128 R4, desc[UR6][R10.64] ;
        /*0040*/                   FADD R4, R4, R5 ;
        /*0050*/                   BRA 0xa0 ;
        /*0060*/                   LDG.E.U16 R4, desc[UR6][R10.64] ;
        /*0070*/                   IMAD.U32 R4, R4, 0x10000, RZ ;
        /*0080*/                   PRMT R5, R4, 0x7732, RZ ;
        /*0090*/                   SHF.L.U32 R5, R5, 0x10, RZ ;
        /*00a0*/              @!P2 BRA 0xd0 ;
        /*00b0*/                   MOV R12, 0xd0 ;
        /*00c0*/                   CALL.REL.NOINC 0x200 ;
        /*00d0*/                   BRA.DIV UR4, 0x160 ;
        /*00e0*/                   SHFL.IDX PT, R3, R5, R10, 0x1f ;
        /*00f0*/              @P1  BRA 0x20 ;
        /*0100*/                   F2I.TRUNC.NTZ R5, R5 ;
        /*0110*/                   STG.E desc[UR6][R4.64], R5 ;
        /*0120*/                   BRA.U UP0, 0x10 ;
        /*0130*/                   EXIT ;
        /*0160*/                   WARPSYNC R4 ;
        /*0170*/                   BRA 0xe0 ;
        /*0180*/                   BRA 0x180 ;
"""


def test_of_a_loop_the_way_counts_that_runs_and_of_one_around_it_its_own():
    code = read_kernels(LISTING)["quantize"]
    inner, outer = loops(code)
    assert [one.name for one in inner.instructions] == [
        *("BRA", "LDG.E.128", "FADD", "BRA", "BRA", "BRA.DIV", "SHFL.IDX", "BRA"),
    ]
    assert [one.name for one in outer.instructions] == ["IADD3", "F2I.TRUNC.NTZ", "STG.E", "BRA.U"]
    assert main_path(code) == inner
    assert inner.pipes == {"control": 5, "LSU": 2, "FMA": 1}
    assert inner.wide == 1 and outer.pipes == {"ALU": 1, "XU": 1, "LSU": 1, "control": 1}


def test_what_is_slowest_limits_the_share():
    h100 = next(gpu for gpu in instructions.GPUS if gpu.name == "H100")
    assert instructions.estimate(h100, 2.5, 10, {"ALU": 5, "FMA": 5}) == (1.0, "copy")
    share, limit = instructions.estimate(h100, 2.5, 77, {"ALU": 30, "FMA": 47})
    assert limit == "issue" and share == pytest.approx(132 * 1.755e9 / (77 / (128 * 0.85)) * 2.5 / 3e12)
    assert instructions.estimate(h100, 2.5, 40, {"ALU": 40})[1] == "ALU"


def test_the_command_writes_what_it_prints(run, monkeypatch, tmp_path):
    row = instructions.Row("GELU 3 forward", "bfloat16", "H100", 4.375, 41.8, "issue", 62, 4, 0, 0.88)
    monkeypatch.setattr(instructions, "count", lambda *job: [row])
    monkeypatch.setattr(instructions, "find_disassembler", lambda: "cuobjdump")
    monkeypatch.setattr(instructions, "compiler_version", lambda: "13.0")
    options = ["gelu", "--dtype", "bfloat16", "--gpu", "H100", "--jobs", 1, "-o", tmp_path / "k.json"]
    outcome = run("bench", "instructions", *options)
    assert outcome.status == 0, outcome.err
    written = json.loads((tmp_path / "k.json").read_text())
    assert written["rows"][0]["met"] is False and written["assumptions"]["gpus"][1]["copy"] == 3e12
    assert "0.88" in outcome.out and "a copy of 3e12 bytes per second" in outcome.out
    assert run("bench", "instructions", "gelou").err.count("\n") == 1
