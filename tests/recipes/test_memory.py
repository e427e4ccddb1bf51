"""Memory settings give up time, never numbers: predictions and gradients with each equal those without."""

import contextlib
import copy
import itertools
import sys
from collections import Counter

import pytest
import second_device
import torch
from second_device import RUBBISH, Card, There, card, device_is, missing_on_a_mac  # noqa: F401 (fixtures)
from tiny_models import model_of, network_on, tiny_unet

from lora_atelier.trainer_core.config import LoraConfig, MemoryConfig
from lora_atelier.trainer_core.memory import (
    BUDGETS,
    LEVELS,
    PARTS,
    SEGMENTS,
    WHOLE,
    Stream,
    activations_in_ram,
    check_weights,
    compile_blocks,
    copied_before_written,
    keep_weights,
    leave_in_file,
    multiply_in,
    out_of_memory,
    prepare,
    recompute,
    room_for_programs,
    rungs,
    weight_bytes,
    with_room,
)
from lora_atelier.trainer_core.memory.device import DTYPES
from lora_atelier.trainer_core.memory.gradient_checkpointing import Recomputed
from lora_atelier.trainer_core.memory.stream import AHEAD
from lora_atelier.trainer_core.memory.weights import Kept, KeptConv2d, kept_layers
from lora_atelier.trainer_core.models.sd.units import UNQUANTIZED, units
from lora_atelier.trainer_core.optim.rounding import round_stochastically

CPU = torch.device("cpu")


def passes(prepared=lambda unet: None, context=lambda unet: contextlib.nullcontext(), times=2, device=CPU):
    """Return (prediction, gradient of the network) of the last of some passes through a small UNet."""
    unet = tiny_unet().requires_grad_(False).eval()
    network = network_on(unet, LoraConfig(rank=4, alpha=4, preset="full"))
    draws = torch.Generator().manual_seed(1)
    for name, parameter in network.named_parameters():
        if name.endswith("up"):
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=draws)
    prepared(unet)
    latents, words = torch.randn(2, 4, 8, 8, generator=draws), torch.randn(2, 5, 64, generator=draws)
    latents, words, timesteps = latents.to(device), words.to(device), torch.tensor([5, 500]).to(device)
    network.to(device)
    with network.attached():
        for _ in range(times):
            network.zero_grad()
            with context(unet):
                prediction = unet(latents, timesteps, encoder_hidden_states=words).sample
            prediction.square().mean().backward()
    return prediction.detach().cpu(), torch.cat([p.grad.flatten() for p in network.parameters()]).cpu()


@pytest.fixture(scope="module")
def plain():
    return passes(times=1)


def difference(mine, other):
    return float(torch.stack([(a - b).norm() / b.norm() for a, b in zip(mine, other, strict=True)]).max())  # or NaN


@pytest.mark.parametrize("level", [*LEVELS, *SEGMENTS])
def test_recomputing_changes_nothing(plain, level):
    assert difference(passes(lambda unet: recompute(units(unet), level), times=1), plain) == 0


def test_each_level_recomputes_more_than_the_one_before():
    unet = tiny_unet()
    counts = []
    for level in LEVELS:
        recompute(units(unet), level)
        counts.append(sum(isinstance(m.__dict__.get("forward"), Recomputed) for m in unet.modules()))
    blocks = [m for m in unet.modules() if type(m).__name__ in ("ResnetBlock2D", "BasicTransformerBlock")]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == len(blocks)
    assert counts[1] == counts[2] == 3 and counts[3] > 3  # narrow blocks: parts, whole; then wider ones


@pytest.mark.parametrize(
    ("kind", "most"), [("float32", 0.0), ("bfloat16", 0.02), ("float16", 0.003), ("float8", 0.2), ("int8", 0.04)]
)
def test_small_weights_compute_nearly_the_same_and_take_less(plain, kind, most):
    sizes = []

    def keep(unet):
        whole = weight_bytes(unet)
        keep_weights(unet, kind, torch.float32, CPU, unquantized=UNQUANTIZED)
        assert not any(isinstance(m, KeptConv2d) for m in (unet.conv_in, unet.conv_out)) or kind in DTYPES
        sizes.append(weight_bytes(unet) / whole)

    found = difference(passes(keep, times=1), plain)
    assert found <= most and (found > 0) == (kind != "float32")
    expected = {"float32": 1.0, "bfloat16": 0.51, "float16": 0.51, "float8": 0.28, "int8": 0.28}[kind]
    assert sizes[0] == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("kind", ["float8", "int8", "nf4"])
def test_sizes_on_the_meta_device_are_the_true_ones(kind):
    weight = torch.randn(64, 32, 3, 3, generator=torch.Generator().manual_seed(0))
    true, meta = Kept(weight, kind), Kept(weight.to("meta"), kind)
    assert [p.nbytes for p in true.parts] == [p.nbytes for p in meta.parts]
    assert meta.weight(torch.bfloat16).shape == weight.shape


# rows of zeros among others; values that fill no whole scale; 1x1; the first layer of an inpainting model
ODD_SHAPES = ((48, 40), (7, 9), (1, 1), (8, 3, 1, 1), (32, 9, 3, 3))


@pytest.mark.parametrize(("kind", "most"), [("float8", 0.03), ("int8", 0.01), ("nf4", 0.11)])
def test_a_kept_weight_comes_back(kind, most):
    torch._dynamo.utils.counters.clear()
    for shape in ODD_SHAPES:
        for size in (0.02, 1e-5):  # the second: scales that float16 would take for 0
            weight = size * torch.randn(shape, generator=torch.Generator().manual_seed(0))
            weight[1:2] = 0
            kept = Kept(weight, kind)
            back = kept.weight(torch.float32)
            assert back.dtype == torch.float32 and back.shape == shape and not back[1:2].any()
            assert float((back - weight).norm() / weight.norm()) < most
            for dtype in (torch.bfloat16, torch.float16):
                assert torch.equal(kept.weight(dtype), back.to(dtype))  # rounded once
    assert not Kept(torch.zeros(6, 70), kind).weight(torch.float16).any()
    assert not torch._dynamo.utils.counters["stats"]  # bitsandbytes compiles nothing for them


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["float8", "int8", "nf4"])
def test_layers_of_kept_weights_compute_what_plain_ones_of_these_weights_do(kind, dtype):
    torch.manual_seed(0)
    layers = (
        (torch.nn.Linear(9, 7), (2, 5, 9)),
        (torch.nn.Conv2d(9, 8, 3, padding=1), (2, 9, 6, 5)),
        (torch.nn.Conv2d(8, 5, 1), (2, 8, 4, 4)),
        (torch.nn.Conv2d(8, 5, 3, stride=2, padding=1), (2, 8, 7, 8)),
    )
    for layer, size in layers:
        small, plain = (torch.nn.Sequential(copy.deepcopy(layer)).requires_grad_(False).to(dtype) for _ in range(2))
        keep_weights(small, kind, dtype, CPU)
        plain[0].weight = torch.nn.Parameter(small[0].kept.weight(dtype), requires_grad=False)
        passed = []
        for model in (small, plain):
            x = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
            y = model(x)
            y.float().square().sum().backward()
            passed.append((y, x.grad))
        assert torch.equal(passed[0][0], passed[1][0])
        torch.testing.assert_close(passed[0][1], passed[1][1])


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_streamed_weights_change_nothing(plain, share):
    streams = []

    def stream(unet):
        streams.append(Stream(CPU))
        keep_weights(unet, "auto", torch.float32, CPU, share=share, stream=streams[0])
        recompute(units(unet), "full")
        layers = kept_layers(unet)
        away = sum(kept.size for kept in layers if kept.stream is not None)
        assert away / sum(kept.size for kept in layers) == pytest.approx(share, abs=0.1)

    assert difference(passes(stream, times=3), plain) == 0  # it knows the order from the second on


def test_a_pretended_mac_lacks_what_macs_lack(device_is):  # noqa: F811
    there = torch.randn(3, 3).to(device_is("mac"))
    assert {"aten::_linalg_svd", "aten::_linalg_eigh", "aten::_int_mm"} <= missing_on_a_mac()
    assert (
        not {"aten::mm", "aten::convolution", "aten::native_group_norm", "aten::native_layer_norm"} & missing_on_a_mac()
    )
    with pytest.raises(NotImplementedError, match="aten::_linalg_svd"):
        torch.linalg.svd(there)
    with pytest.raises(TypeError, match=r"no torch\.float64"):
        there.double()
    with pytest.raises(TypeError, match=r"no torch\.float8_e4m3fn"):
        there.to(torch.float8_e4m3fn)
    assert torch.equal(there.to(torch.bfloat16).cpu(), there.cpu().to(torch.bfloat16)) and not hasattr(Card, "Stream")


def test_the_second_device_finds_what_it_is_there_to_find(card):  # noqa: F811
    here, there = torch.randn(3, 3), torch.randn(3, 3).to(card)
    with pytest.raises(RuntimeError, match="same device: aten::mm"):
        there @ here
    assert torch.equal((there @ there).cpu(), there.cpu() @ there.cpu()) and there[here > 0].device.type == card.type
    early = there.to("cpu", non_blocking=True)
    assert (early == RUBBISH).all()
    Card.first.record_event().synchronize()
    assert torch.equal(early, there.cpu())
    side = Card.Stream()
    with Card.stream(side):
        late, kept = here.to(card, non_blocking=True), there.to("cpu", non_blocking=True)
    assert (late.cpu() == RUBBISH).all() and (kept == RUBBISH).all()
    Card.current_stream().wait_stream(side)
    assert torch.equal(late.cpu(), here) and torch.equal(kept, there.cpu())
    with Card.stream(side):
        there.clone().to("cpu", non_blocking=True)
    with pytest.raises(RuntimeError, match="given back"):
        Card.current_stream().wait_stream(side)


@pytest.mark.parametrize(
    ("level", "weights", "activations"),
    [
        pytest.param("0", "none", True, marks=pytest.mark.thorough),
        pytest.param("full", "half", False, marks=pytest.mark.thorough),
        ("full", "all", True),
    ],
)
def test_what_comes_and_goes_beside_the_computing_is_there_in_time(plain, card, level, weights, activations):  # noqa: F811
    memory = MemoryConfig(checkpointing=level, offload_weights=weights)

    def prepared(unet):
        prepare(model_of(unet), memory, "auto", card, Stream(card))

    def context(unet):
        return activations_in_ram(card, [unet], least=100) if activations else contextlib.nullcontext()

    assert difference(passes(prepared, context, device=card), plain) < 1e-5


@pytest.mark.parametrize("level", [pytest.param("0", marks=pytest.mark.thorough), "full"])
def test_weights_in_a_file_are_there_in_time_and_read_no_oftener_than_used(plain, card, level):  # noqa: F811
    reads = Counter()

    class InFile:
        def __init__(self, weight):
            self.weight = weight.detach().clone()

        def read(self):
            reads[self] += 1
            return self.weight.clone()

    def prepared(device):
        def prepared(unet):
            for layer in unet.modules():
                if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d)):
                    layer.stored, layer.weight = InFile(layer.weight), torch.nn.Parameter(layer.weight.to("meta"))
            assert leave_in_file(unet) and not any(hasattr(layer, "stored") for layer in unet.modules())
            memory = MemoryConfig(checkpointing=level, offload_weights="file")
            prepare(model_of(unet), memory, "auto", device, Stream(device))

        return prepared

    assert difference(passes(prepared(CPU), times=3), plain) == 0
    uses = 3 * (3 if level == "full" else 2)
    assert sum(reads.values()) <= uses * len(reads) + AHEAD * 3
    assert difference(passes(prepared(card), device=card), plain) < 1e-5


@pytest.mark.thorough
def test_small_weights_come_and_go_as_those_of_this_device(card):  # noqa: F811
    def passes_on(device):
        memory = MemoryConfig(checkpointing="full", offload_weights="all")

        def prepared(unet):
            prepare(model_of(unet), memory, "float8", device, Stream(device))

        return passes(prepared, device=device)

    assert difference(passes_on(card), passes_on(CPU)) < 1e-5


def test_streamed_weights_go_to_the_card_and_never_back(card, monkeypatch):  # noqa: F811
    moved, carry_out, sizes, waiting, before = Counter(), second_device.carry_out, [], [], []

    def counted(func, args, kwargs):
        found = carry_out(func, args, kwargs)
        if func._schema.name in ("aten::_to_copy", "aten::copy_"):
            source = args[func._schema.name == "aten::copy_"]
            moved[isinstance(source, There), isinstance(found, There)] += source.nbytes
        return found

    def prepared(unet):
        memory, stream = MemoryConfig(checkpointing="full", offload_weights="all"), Stream(card)
        prepare(model_of(unet), memory, "auto", card, stream)
        send = stream._send
        stream._send = lambda kept: waiting.append(len(stream._arriving)) or send(kept)
        sizes.append(sum(kept.size for kept in kept_layers(unet)))
        moved.clear()

    def context(unet):
        before.append(moved[False, True])
        return contextlib.nullcontext()

    monkeypatch.setattr(second_device, "carry_out", counted)
    prediction, gradient = passes(prepared, context, times=3, device=card)
    assert moved[True, False] == prediction.nbytes + gradient.nbytes
    step = moved[False, True] - before[-1]  # of the last pass
    assert 2 * sizes[0] < step <= 3 * sizes[0]  # for the forward pass, the second one and the backward pass
    assert max(waiting) <= AHEAD


def test_what_is_overwritten_on_its_way_to_ram_counts_as_it_was(card):  # noqa: F811
    x = torch.full((100,), 3.0).to(card).requires_grad_()
    with copied_before_written():
        with activations_in_ram(card, [], least=0, written=True):
            inner = x * 2
            outer = inner * inner
            inner.add_(1)
        outer.sum().backward()
    assert torch.equal(x.grad.cpu(), torch.full((100,), 24.0))


def test_a_stream_learns_the_order_and_sends_ahead():
    stream = Stream(CPU)
    layers = [Kept(torch.full((2, 2), float(i)), "float32") for i in range(6)]
    sent = []
    original = stream._send
    stream._send = lambda kept: sent.append(layers.index(kept)) or original(kept)
    for kept in layers * 2:
        stream.fetch(kept)
    sent.clear()
    assert [float(stream.fetch(kept)[0][0, 0]) for kept in layers] == [0, 1, 2, 3, 4, 5]
    assert sent == [3, 4, 5, 0, 1, 2]  # each three uses ahead, and none of them twice


def test_memory_settings_can_go_further_down_during_a_run(plain):
    def twice(unet):
        stream = Stream(CPU)
        for level, weights in (("0", "none"), ("full", "all")):
            memory = MemoryConfig(checkpointing=level, offload_weights=weights)
            prepare(model_of(unet), memory, "auto", CPU, stream)
        assert all(kept.stream is stream for kept in kept_layers(unet)) and kept_layers(unet)

    assert difference(passes(twice, times=3), plain) == 0


@pytest.mark.parametrize("level", ["0", "full"])
def test_activations_in_ram_change_nothing(plain, level):
    found = passes(lambda unet: recompute(units(unet), level), lambda unet: activations_in_ram(CPU, [unet], least=100))
    assert difference(found, plain) < 1e-5  # copies may take another order of summation


def test_channels_last_changes_nothing_but_rounding(plain):
    memory = MemoryConfig(checkpointing="0", channels_last="on")
    found = passes(lambda unet: prepare(model_of(unet), memory, "auto", CPU, Stream(CPU)))
    assert difference(found, plain) < 1e-5


@pytest.mark.parametrize(
    ("part", "blocks", "most"),
    [
        ("mid_block", 3, 2),  # two resnets of a shape, and a transformer block
        # 12 resnets and transformer blocks in six shapes; each shape with and without what others do not have
        pytest.param("", 12, 10, marks=pytest.mark.thorough),
    ],
)
def test_blocks_that_are_alike_are_compiled_once_and_compute_the_same(part, blocks, most, plain):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    notes, compiled = [], []

    def prepared(unet):
        inside = set(unet.get_submodule(part).modules())
        compiled.extend((unit, least) for unit, least in units(unet) if unit in inside and least >= WHOLE)
        compile_blocks(compiled, notes.append, "eager")

    assert difference(passes(prepared), plain) < 1e-5 and not notes and len(compiled) == blocks
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= most
    torch._dynamo.reset()


def programs_for(lengths, sizes=((8, 8),), block="BasicTransformerBlock", blocks=1):
    """Count the compiled programs after each pass with a text of some tokens; also check its bits.

    A length with a minus is padded, and the padding masked. blocks: of that kind that are compiled.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    unet, counts, notes = tiny_unet().requires_grad_(False).eval(), [], []
    chosen = [unit for unit in units(unet) if block in type(unit[0]).__name__ and unit[1] >= WHOLE][:blocks]
    draws = torch.Generator().manual_seed(1)
    with room_for_programs(True):
        programs = compile_blocks(chosen, notes.append, "eager")
        for length, size in itertools.product(lengths, sizes):
            words = torch.randn(1, abs(length), 64, generator=draws)
            mask = {"encoder_attention_mask": torch.ones(1, -length, dtype=torch.bool)} if length < 0 else {}
            given = torch.randn(1, 4, *size, generator=draws), torch.tensor([5]), words
            found = []
            for programs.in_use in (True, False):
                found.append(unet(*given, **mask).sample)
            assert torch.equal(*found) and not notes
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    return counts


def test_a_text_of_any_length_needs_two_programs_of_a_block():
    """One for the first length, one for all others, and as many where a text is padded and masked."""
    assert programs_for([77, 154, 231, 2464, 77]) == [1, 2, 2, 2, 2]


@pytest.mark.thorough
def test_texts_and_pictures_of_any_size_need_few_programs_of_a_model():
    assert programs_for([77, 154, -154, 231, -231, -385]) == [1, 2, 3, 3, 4, 4]
    sizes = [(8, 8), (8, 16), (16, 8), (16, 16), (8, 24)]
    assert programs_for([77, 154, 231], sizes, block="", blocks=99)[-1] <= 13


@pytest.mark.thorough
def test_blocks_that_multiply_in_8_bits_are_compiled_too():
    def keep(unet):
        keep_weights(unet, "auto", torch.float32, CPU, linear=True)
        multiply_in("int8", [m for m in unet.down_blocks[0].attentions.modules() if isinstance(m, torch.nn.Linear)])

    def compiled(unet):
        keep(unet)
        compile_blocks(units(unet), notes.append, "eager")

    notes = []
    assert difference(passes(compiled), passes(keep)) < 1e-3 and not notes


def test_there_is_room_for_a_program_for_every_shape_and_only_then():
    import torch._dynamo as dynamo

    before = dynamo.config.recompile_limit
    with room_for_programs(False):
        assert dynamo.config.recompile_limit == before
    with room_for_programs(True):
        assert dynamo.config.recompile_limit > 48
    assert dynamo.config.recompile_limit == before


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"),
            True,
        ),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_memory_that_ran_out_is_known_by_what_the_libraries_say(error, expected):
    assert out_of_memory(error) == expected


def test_where_compiling_fails_the_run_continues_and_says_so_once(plain):
    def broken(graph, inputs):
        raise RuntimeError("no compiler here")

    torch._dynamo.reset()
    notes = []
    assert difference(passes(lambda unet: compile_blocks(units(unet), notes.append, broken)), plain) == 0
    assert len(notes) == 1 and "continues without it" in notes[0] and "no compiler here" in notes[0]
    torch._dynamo.reset()


def test_rungs_go_from_fast_to_small_and_leave_what_is_fixed():
    gpu = torch.device("cuda")
    found = rungs(MemoryConfig(), gpu)
    assert [rung.checkpointing for rung in found] == [*LEVELS, "full", "full", "full"]
    assert [rung.offload_weights for rung in found][-4:] == ["none", "none", "half", "all"]
    found = [rung.checkpointing for rung in rungs(MemoryConfig(), CPU, parts=False)]
    assert found == [*LEVELS[:1], *LEVELS[2:], *SEGMENTS]
    # The compiler chooses within blocks, which would fall into pieces if parts of them were recomputed.
    found = rungs(MemoryConfig(compile=True), gpu)
    assert [rung.checkpointing for rung in found] == ["0", *BUDGETS, *["full"] * 4]
    for budget in BUDGETS:
        assert {rung.checkpointing for rung in rungs(MemoryConfig(compile=True, checkpointing=budget), gpu)} == {budget}
    chosen = rungs(MemoryConfig(checkpointing=PARTS, compile=True), CPU, parts=False)
    assert [rung.checkpointing for rung in chosen] == [PARTS]
    fixed = rungs(MemoryConfig(checkpointing="2", offload_activations="off"), gpu)
    assert {(rung.checkpointing, rung.offload_activations) for rung in fixed} == {("2", "off")}
    assert [rung.offload_weights for rung in fixed] == ["none", "half", "all"]
    kept = rungs(MemoryConfig(checkpointing="2"), gpu)  # all that blocks keep would move: weights move first
    assert [(rung.offload_weights, rung.offload_activations) for rung in kept] == [
        ("none", "off"),
        ("half", "off"),
        ("all", "off"),
        ("all", "on"),
    ]
    assert [rung.checkpointing for rung in rungs(MemoryConfig(), CPU)] == [*LEVELS, *SEGMENTS]


def test_a_kind_that_needs_bitsandbytes_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match="weights nf4 needs the package bitsandbytes; install it with ComfyUI's"):
        check_weights("nf4", "weights", CPU)
    check_weights("float8", "weights", CPU)


def test_stochastic_rounding_keeps_the_mean():
    values = torch.full((200_000,), 1.001)  # between 1 and 1.0078125, near the first
    rounded = round_stochastically(values, torch.Generator().manual_seed(0)).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0078125}
    assert float(rounded.mean()) == pytest.approx(1.001, abs=5 * 0.0026 / 200_000**0.5)
    exact = torch.tensor([0.0, -1.5, 3.0, -0.0078125])
    assert torch.equal(round_stochastically(exact, torch.Generator().manual_seed(1)).float(), exact)
    assert float(round_stochastically(-values, torch.Generator().manual_seed(2)).float().mean()) < -1.0


def test_work_for_which_a_device_has_no_room_is_done_on_the_cpu():
    asked, moves = [], []
    module = torch.nn.Linear(1, 1)
    module.to = lambda device: moves.append(str(device))

    def work(linear):
        asked.append(linear)
        if len(asked) == 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return 7

    assert with_room(work, module, torch.device("cpu")) == (7, False) and not moves
    assert with_room(work, module, torch.device("cuda")) == (7, True)
    assert asked == [module] * 3 and moves == ["cpu", "cuda"]
    asked[:] = [1]
    with pytest.raises(torch.cuda.OutOfMemoryError):  # not ours to move: again there would be no room
        with_room(work, torch.nn.Identity(), torch.device("cuda"))


def test_other_errors_are_not_taken_for_a_lack_of_room():
    def work(linear):
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        with_room(work, torch.nn.Linear(1, 1), torch.device("cuda"))
