SMALL = ["--tokens", "32", "--hidden", "16", "--intermediate", "64"]


def test_it_is_measured_and_drawn_again(run, tmp_path):
    run("plot", "memory", *SMALL, "-o", tmp_path / "a.png")
    run("plot", "memory", "--input", tmp_path / "a.json", "-o", tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
