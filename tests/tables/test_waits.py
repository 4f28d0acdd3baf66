import logging
import threading

from fewbit.tables.waits import phases_of, ticking


def test_who_waits_is_told_again_and_again_until_the_end():
    told, twice = [], threading.Event()

    def tell(seconds):
        told.append(seconds)
        if len(told) == 2:
            twice.set()

    with ticking(tell, 0.01, 0.02):
        assert twice.wait(60)
    count = len(told)
    assert told == sorted(told) and told[0] >= 0.01
    with ticking(told.append, 60.0, 60.0):
        pass
    assert len(told) == count


def test_a_phase_is_what_a_logger_said_last_and_the_logger_is_left_as_it_was(caplog):
    log = logging.getLogger("fewbit.test")
    before = log.level, log.propagate, [*log.handlers]
    with phases_of("fewbit.test", "planning") as phase:
        assert phase() == "planning"
        log.info("plan %d of %d", 3, 12)
        assert phase() == "plan 3 of 12"
    assert (log.level, log.propagate, log.handlers) == before and not caplog.records


def test_lines_that_a_user_asked_for_are_still_said(caplog):
    with caplog.at_level(logging.INFO, "fewbit.test"), phases_of("fewbit.test", "planning"):
        logging.getLogger("fewbit.test").info("solving")
    assert [record.getMessage() for record in caplog.records] == ["solving"]
