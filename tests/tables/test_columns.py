from fewbit.tables.columns import columns


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
