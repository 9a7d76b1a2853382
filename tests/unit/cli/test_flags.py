"""The arguments of a program after the flags of sparkhvdrun."""

from __future__ import annotations

import pytest

from sparkhvd.cli.flags import parser


def flags_of_programs():
    """Return arguments of programs: shortened and full flags of sparkhvdrun, and other flags."""
    whole = [flag for action in parser()._actions for flag in action.option_strings]
    shortened = {flag[:length] for flag in whole for length in range(2, len(flag))} - {"--"}
    return sorted({*whole, *shortened, "-m", "-x", "-c", "-5", "--lr=0.1", "-pr", "-p22"})


@pytest.mark.parametrize("word", flags_of_programs())
def test_the_arguments_of_a_program_are_passed_on(word):
    command = ["python", word, "value", "--epochs", "3", word]
    flags = parser().parse(["-np", "2", *command])
    assert (flags.num_proc, flags.command) == (2, command)


def test_a_short_flag_takes_its_value_without_a_space():
    flags = parser().parse(["-p22", "-np", "2", "program"])
    assert (flags.ssh_port, flags.num_proc, flags.command) == (22, 2, ["program"])


@pytest.mark.parametrize("word", ["-min", "--min-n", "--verb"])
def test_a_shortened_flag_is_refused_with_the_full_flag(word, capsys):
    with pytest.raises(SystemExit):
        parser().parse(["-np", "2", word, "program"])
    assert f"unknown flag {word}. Did you mean" in capsys.readouterr().err
