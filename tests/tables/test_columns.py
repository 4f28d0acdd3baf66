from fewbit.tables.columns import columns, wrapped_sizes


def test_names_are_cut_in_front_until_a_line_fits():
    rows = [("name", "choice", "bytes"), ("model.layers.0.self_attn.q_proj", "4 bits", "1,024"), ("head", "x", "2")]
    assert list(columns(rows, 2)) == [
        "name                             choice  bytes",
        "model.layers.0.self_attn.q_proj  4 bits  1,024",
        "head                             x           2",
    ]
    assert list(columns(rows, 2, 34)) == [
        "name                 choice  bytes",
        "…0.self_attn.q_proj  4 bits  1,024",
        "head                 x           2",
    ]


def test_numbers_and_short_names_are_never_cut():
    rows = [("a" * 20, "9" * 40)]
    assert list(columns(rows, 1, 30)) == ["…" + "a" * 11 + "  " + "9" * 40]


def test_a_size_stays_on_the_line_of_its_unit():
    for offset in range(20):
        text = ", ".join(["x" * offset, *(f"{name} 1.5 KiB" for name in "abcdefghijklmnop")])
        lines = wrapped_sizes(text)
        assert " ".join(line.strip() for line in lines) == text
        assert len(lines) == 2 and all(len(line) <= 100 and not line[-1].isdigit() for line in lines)
