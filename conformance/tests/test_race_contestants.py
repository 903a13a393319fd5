"""Every contestant trains the same model: its losses are the reference's, eager and compiled, on its architecture."""

import math

import numpy as np
import pytest

from conformance.race.contestants import WORDS, all_contestants, chosen, missing
from conformance.race.contestants.base import Contestant
from conformance.race.device import variables
from conformance.race.figures import loss_distance
from conformance.race.lane import AGREEMENT_UPDATES, reference
from conformance.race.process import Process
from conformance.race.racing import needed
from conformance.race.task import ARCHITECTURES, RECURRENT, Size, Task

# Small enough to compile in seconds; every axis of another size.
SHAPE = Size(width=24, heads=3, layers=2, length=10, batch=2)
PEERS = {
    (name, architecture)
    for name, contestant in all_contestants().items()
    for architecture in contestant.architectures
    if name != "numpy"
}


def losses(name: str, task: Task) -> list[float]:
    """Of the first updates, in a process as the race starts it."""
    contestant = all_contestants()[name]
    more = {**dict(contestant.environment), **variables(contestant.framework, task.device)}
    process = Process(threads=1, timeout=240, variables=more)
    try:
        process.ask({"do": "build", "contestant": name, "task": task.spec()})
        return process.ask({"do": "steps", "count": AGREEMENT_UPDATES})["losses"]
    finally:
        process.close()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "architecture"), sorted(PEERS))
def test_a_contestant_trains_the_references_model(name, architecture):
    for module in missing(all_contestants()[name]):
        pytest.importorskip(module)
    task = Task(SHAPE, architecture)
    if architecture in RECURRENT:
        expected = losses(f"torch-{architecture}", task)
    else:
        expected = reference(task, 1, 240)["losses"]
    assert loss_distance(losses(name, task), expected) <= task.loss_tolerance
    assert min(expected) < expected[0] - 0.002  # something was learnt, so the optimiser is in it too


def test_a_torch_peer_and_an_own_backend_agree_on_an_architecture_of_a_peer():
    pytest.importorskip("torch")
    pytest.importorskip("x_transformers")
    task = Task(SHAPE, "gpt-unbiased")
    expected = reference(task, 1, 120)["losses"]
    for name in ("x-transformers", "torch"):
        assert loss_distance(losses(name, task), expected) <= task.loss_tolerance
    gpt = reference(Task(SHAPE), 1, 120)["losses"]
    assert loss_distance(gpt, expected) > task.loss_tolerance  # the two models are not the same work


def test_words_stand_for_contestants_and_peers_bring_ours():
    known = all_contestants()
    assert chosen("jax,numpy") == ["numpy", "jax"]  # in the order of the table
    assert chosen("ours") == ["numpy", "torch", "torch-compiled", "jax"]
    assert set(chosen("ours")) < set(chosen("peers")) < set(chosen("all")) == set(known)
    assert not any(known[name].architectures[0] in RECURRENT for name in chosen("peers"))
    assert all(chosen(word) for word in WORDS)


@pytest.mark.parametrize(
    ("text", "came"), [("nobody", "'nobody'"), ("torch,x,y", "'x', 'y'"), ("", "nothing"), (" , ", "nothing")]
)
def test_a_name_that_is_no_contestant_is_refused_with_those_that_are(text, came):
    with pytest.raises(ValueError, match=f"unknown contestant {came}; known are numpy, torch.* and the words ours"):
        chosen(text)


def test_architectures_are_those_that_the_chosen_need():
    assert needed(["torch", "jax"]) == ["gpt"] and needed(["torch"]) == ["gpt"]
    assert needed(["torch", "hf-llama"]) == ["llama"]  # torch alone on gpt would be no race
    assert needed(["torch", "hf-gpt2", "x-transformers", "hf-llama"]) == ["gpt", "gpt-unbiased", "llama"]


def test_a_contestant_says_what_it_cannot():
    plain = Contestant("plain", lambda task: None, (), framework="jax")
    assert plain.cannot(Task()) is None
    assert plain.cannot(Task(architecture="llama")) == "does not build the llama architecture"
    assert plain.cannot(Task(precision="bfloat16", remat=True)) == "does not offer bfloat16 and remat"
    assert plain.cannot(Task(measure="decode")) == "does not offer decode"
    assert Contestant("n", lambda task: None, ()).cannot(Task(device="cuda")) == "numpy has no device 'cuda'"
    assert Contestant("t", lambda task: None, (), framework="torch").cannot(Task(device="tpu")) is not None


def test_every_contestant_declares_what_the_table_shows():
    for name, contestant in all_contestants().items():
        assert contestant.name == name and contestant.note and contestant.requires
        assert set(contestant.architectures) <= set(ARCHITECTURES)
        assert contestant.offers <= {"bfloat16", "remat", "decode", "devices"}
        assert contestant.group in ("numpy", "torch eager", "torch compiled", "jax compiled")


def test_a_task_goes_to_another_process_and_back():
    task = Task(SHAPE, "llama", precision="bfloat16", remat=True, measure="decode", device="cuda")
    again = Task.from_spec(task.spec())
    assert again.spec() == task.spec() and again.model == task.model and again.train == task.train
    assert again.title == "C24 H3 L2 T10 B2, llama, bfloat16, remat, decode, cuda"
    assert Task("small").replace(length=64, layers=1).shape == Size(256, 8, 1, 64, 8)
    assert Task("tiny").replace(measure="forward").flops * 3 == Task("tiny").flops


def test_flops_of_a_recurrent_model_are_those_on_paper():
    lstm, gru = (Task(SHAPE, name) for name in ("lstm", "gru"))
    B, T, C, L, V = 2, 10, 24, 2, 256
    head = 2 * B * T * C * V
    assert lstm.flops == 3 * (B * T * L * 2 * (C + C) * 4 * C + head)
    assert gru.flops == 3 * (B * T * L * 2 * (C + C) * 3 * C + head)


def test_prompts_leave_room_for_what_is_decoded():
    task = Task(SHAPE, measure="decode")
    assert task.decoded == 5 and task.prompts().shape == (2, 5) and task.tokens == 10
    assert np.array_equal(task.prompts(), next(task.batches())["tokens"][:, :5])
    assert math.isfinite(task.flops)
