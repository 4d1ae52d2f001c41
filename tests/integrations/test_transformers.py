"""Models of transformers, small and with random weights; its generation, its files, its Trainer."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shallower import Pruner, apply_structure, find_blocks, survey
from shallower.discovery import run_example
from shallower.whole import Whole
from tests.integrations.laws import check_laws, tamed

pytest.importorskip("transformers")

import transformers as hf

from shallower.integrations.transformers import PruningCallback

WORDS = torch.arange(24).reshape(2, 12) % 50 + 3
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 3}
LLAMA = {**SMALL, "num_key_value_heads": 1, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=64, n_positions=32, **ENDS)
    )


def t5() -> nn.Module:
    sizes = {"num_layers": 3, "d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "vocab_size": 64}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0))


def whisper() -> nn.Module:
    sizes = {"d_model": 32, "vocab_size": 64, "max_source_positions": 16, "num_mel_bins": 8}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_ffn_dim": 64, f"{side}_attention_heads": 2}
    words = {"pad_token_id": 0, "decoder_start_token_id": 1, **ENDS}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes, **words))


TEXT = {"input_ids": WORDS}
MODELS: dict[str, tuple[Any, dict[str, torch.Tensor], int, int]] = {  # and blocks: the sums, and whole layers
    "gpt2": (gpt2, TEXT, 6, 3),
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)), TEXT, 6, 3),
    "qwen2": (lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**LLAMA)), TEXT, 6, 3),
    "mistral": (lambda: hf.MistralForCausalLM(hf.MistralConfig(**LLAMA)), TEXT, 6, 3),
    "bert": (lambda: hf.BertModel(hf.BertConfig(**SMALL, vocab_size=64)), TEXT, 6, 0),
    "roberta": (lambda: hf.RobertaModel(hf.RobertaConfig(**SMALL, vocab_size=64)), TEXT, 6, 0),
    "t5": (t5, {**TEXT, "labels": WORDS}, 12, 0),
    "vit": (
        lambda: hf.ViTModel(hf.ViTConfig(**SMALL, image_size=32, patch_size=8)),
        {"pixel_values": torch.randn(2, 3, 32, 32)},
        6,
        3,
    ),
    "whisper": (whisper, {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": WORDS}, 8, 4),
}
DECODERS = ("gpt2", "llama", "qwen2", "mistral")


@pytest.mark.parametrize("name", list(MODELS))
def test_the_laws_hold(name):
    build, example, blocks, _ = MODELS[name]
    assert len(check_laws(build(), example, closings=2)) == blocks


@pytest.mark.parametrize("name", [name for name, row in MODELS.items() if row[3]])
def test_the_laws_hold_for_whole_layers(name):
    build, example, _, layers = MODELS[name]
    assert len(check_laws(build(), example, closings=2, whole=True)) >= layers


def pruned(name: str, gone: list[int], *, whole: bool) -> tuple[nn.Module, nn.Module, list[str]]:
    """A decoder without some of its blocks, the one that it was, and the names of what it lost."""
    build, example, *_ = MODELS[name]
    model = tamed(build()).eval()
    original = copy.deepcopy(model)
    blocks = find_blocks(model, example, whole=whole)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = Pruner(model, optimizer, dataset_size=10, log_gamma=-1.0, theta=1.0, blocks=blocks)
    pruner.num_steps = pruner.vitals.learned = 1
    pruner.theta[gone] = 0.0
    pruner.finalize()
    return pruner.finish().eval(), original, [blocks[i].name for i in gone]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", DECODERS)
def test_a_cache_changes_no_token(name, whole):
    net, _, _ = pruned(name, [0] if whole else [0, 2, 3], whole=whole)
    assert net.config.num_hidden_layers == 2
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        cached, plain = (net.generate(WORDS[:, :5], use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, plain)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", DECODERS)
def test_a_step_with_a_cache_is_a_step_without(name, whole):
    """More than the tokens: the very logits."""
    net, _, _ = pruned(name, [0] if whole else [0, 2, 3], whole=whole)
    with torch.no_grad():
        full = net(WORDS).logits[:, -1]
        cache = net(WORDS[:, :-1], use_cache=True).past_key_values
        step = net(WORDS[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1]
    assert torch.allclose(step, full, atol=1e-4 * float(full.abs().max()))


def test_a_model_of_two_stacks_keeps_each_count_of_its_own():
    model = tamed(t5()).eval()
    example = MODELS["t5"][1]
    before = run_example(model, example).logits
    blocks = [b for b in find_blocks(model, example) if b.name == "decoder.block.1.layer.0"]
    apply_structure(model, {"removed": []}, example=example)
    assert torch.equal(run_example(model, example).logits, before)  # nothing pruned, nothing changed
    apply_structure(model, {"removed": [blocks[0].name]}, example=example)
    assert (model.config.num_layers, model.config.num_decoder_layers) == (3, 3)
    assert not torch.equal(run_example(model, example).logits, before)
    options = {"max_new_tokens": 5, "do_sample": False}
    with torch.no_grad():
        cached, plain = (model.generate(WORDS, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, plain)


@pytest.mark.parametrize("gone", ["decoder.block.1.", "encoder.block.2."])
def test_a_layer_of_t5_that_has_lost_all_of_its_parts_leaves(gone, tmp_path):
    example = MODELS["t5"][1]
    torch.manual_seed(0)
    model = tamed(t5()).eval()
    removed = [b.name for b in find_blocks(model, example) if b.name.startswith(gone)]
    mute = copy.deepcopy(model)
    for name in removed:
        for parameter in mute.get_submodule(name).parameters():
            nn.init.zeros_(parameter)
    if gone.startswith("decoder"):
        net = apply_structure(model, {"removed": removed}, example=example)
        assert len(net.decoder.block) == net.config.num_decoder_layers == 2
        net.save_pretrained(tmp_path)
        again = type(net).from_pretrained(tmp_path).eval()
        assert torch.equal(run_example(again, example).logits, run_example(net, example).logits)
    else:  # transformers itself cannot generate with fewer layers there
        with pytest.warns(UserWarning, match="stay in the model, empty: the library would take"):
            net = apply_structure(model, {"removed": removed}, example=example)
    assert torch.allclose(run_example(net, example).logits, run_example(mute, example).logits, atol=1e-4)
    with torch.no_grad():
        options = {"max_new_tokens": 5, "do_sample": False}
        cached, plain = (net.generate(WORDS, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, plain)


def test_attention_of_several_kinds_keeps_its_cache_or_is_refused():
    sizes = {**LLAMA, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 4, "pad_token_id": 0}
    kinds = ["sliding_attention", "full_attention"] * 2

    def build() -> nn.Module:
        torch.manual_seed(0)
        return hf.Gemma2ForCausalLM(hf.Gemma2Config(**sizes, layer_types=list(kinds))).eval()

    names = [b.name for b in find_blocks(build(), TEXT)]
    attention = [n for n in names if n.endswith("self_attn")]
    with pytest.raises(ValueError, match="several kinds"):
        apply_structure(build(), {"removed": [attention[0]]}, example=TEXT)
    net = apply_structure(build(), {"removed": [attention[1]]}, example=TEXT)
    with torch.no_grad():
        full = net(WORDS).logits[:, -1]
        cache = net(WORDS[:, :-1], use_cache=True).past_key_values
        step = net(WORDS[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1]
    assert torch.allclose(step, full, atol=1e-4)


def test_layers_that_know_their_number_in_other_ways_are_refused():
    torch.manual_seed(0)
    config = hf.GPT2Config(
        n_layer=3, n_embd=32, n_head=2, vocab_size=64, scale_attn_by_inverse_layer_idx=True, **ENDS
    )
    model = hf.GPT2LMHeadModel(config).eval()
    with pytest.raises(ValueError, match="scale_attn_by_inverse_layer_idx"):
        apply_structure(model, {"removed": ["transformer.h.0"]}, example=TEXT)


@pytest.mark.parametrize("name", DECODERS)
def test_a_model_without_some_layers_is_a_shallower_model_of_its_class(name, tmp_path):
    net, original, _ = pruned(name, [1], whole=True)
    net.save_pretrained(tmp_path)
    native = type(original).from_pretrained(tmp_path).eval()
    assert [type(m) for m in native.modules()] == [type(m) for m in net.modules()]
    with torch.no_grad():
        assert torch.equal(native(**TEXT).logits, net(**TEXT).logits)
    assert type(original)(copy.deepcopy(net.config)).state_dict().keys() == net.state_dict().keys()


MASKED = {**TEXT, "attention_mask": torch.ones_like(WORDS).index_fill(1, torch.arange(4), 0)}
FOUR = {**LLAMA, "num_hidden_layers": 4, "num_key_value_heads": 2, "pad_token_id": 0}


def without(model: nn.Module, *gone: str) -> nn.Module:
    """A model that training has taken these layers from, as wholes."""
    model = tamed(model).eval()
    blocks = find_blocks(model, TEXT, whole=True)
    pruner = Pruner(
        model, torch.optim.SGD(model.parameters(), lr=0.1), dataset_size=10, log_gamma=-1.0, blocks=blocks
    )
    pruner.num_steps = pruner.vitals.learned = 1
    for i, name in enumerate(pruner.names):
        pruner.theta[i] = float(name not in gone)
    pruner.finalize()
    return pruner.finish().eval()


@pytest.mark.parametrize("example", [TEXT, MASKED])
def test_layers_are_whole_with_a_padding_mask_and_a_sliding_window_too(example):
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4, "head_dim": 16}
    for model in (
        hf.LlamaForCausalLM(hf.LlamaConfig(**FOUR)),
        hf.Gemma2ForCausalLM(hf.Gemma2Config(**FOUR, **kinds)),
    ):
        found = survey(model.eval(), example, whole=True)
        assert [block.name for block in found.blocks] == [f"model.layers.{i}" for i in range(4)]
        assert all(isinstance(block, Whole) for block in found.blocks)


def test_layers_that_are_not_whole_are_listed_and_nothing_is_taken_in_their_place():
    found = survey(hf.BertModel(hf.BertConfig(**SMALL, vocab_size=64)).eval(), TEXT, whole=True)
    assert not found.blocks
    assert all(f"encoder.layer.{i}" in found.rejected for i in range(3))


def test_lists_of_a_configuration_change_if_they_are_of_its_layers(tmp_path):
    sizes = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = hf.Qwen3MoeConfig(**{**FOUR, "eos_token_id": [2, 5, 7, 9]}, **sizes, mlp_only_layers=[1, 3])
    net = without(hf.Qwen3MoeForCausalLM(config), "model.layers.1")
    assert net.config.eos_token_id == [2, 5, 7, 9]
    assert net.config.mlp_only_layers == [2]
    net.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(type(net).from_pretrained(tmp_path).eval()(WORDS).logits, net(WORDS).logits)


def test_layers_with_a_number_of_their_own_stay_empty_and_are_told_of():
    """DiffLlama computes a constant of each layer from its place."""
    model = hf.DiffLlamaForCausalLM(hf.DiffLlamaConfig(**FOUR))
    with pytest.warns(UserWarning, match=r"stay in the model, empty: .*lambda_init"):
        net = without(model, "model.layers.1")
    assert len(net.model.layers) == net.config.num_hidden_layers == 4
    assert not list(net.model.layers[1].parameters())
    with torch.no_grad():
        full = net(WORDS).logits[:, -1]
        cache = net(WORDS[:, :-1], use_cache=True).past_key_values
        step = net(WORDS[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1]
    assert torch.allclose(step, full, atol=1e-4 * float(full.abs().max()))


def test_a_layer_that_has_a_number_itself_may_lose_its_attention():
    config = hf.Gemma3TextConfig(**FOUR, head_dim=16, layer_types=["full_attention"] * 4)
    net = apply_structure(
        tamed(hf.Gemma3ForCausalLM(config)).eval(), {"removed": ["model.layers.0.self_attn"]}, example=TEXT
    )
    with torch.no_grad():
        full = net(WORDS).logits[:, -1]
        cache = net(WORDS[:, :-1], use_cache=True).past_key_values
        step = net(WORDS[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1]
    assert torch.allclose(step, full, atol=1e-4 * float(full.abs().max()))


def test_what_lost_parts_of_layers_comes_back_with_its_structure():
    net, original, removed = pruned("gpt2", [0, 3], whole=False)
    fresh = apply_structure(gpt2(), {"removed": removed}, example=TEXT)
    fresh.load_state_dict(net.state_dict())
    with torch.no_grad():
        assert torch.equal(run_example(fresh.eval(), TEXT).logits, net(**TEXT).logits)
    assert sum(p.numel() for p in fresh.parameters()) < sum(p.numel() for p in original.parameters())


# -- the Trainer ----------------------------------------------------------------------------------------


class Lines(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(8) * (index % 5 + 1) + index) % 61 + 3
        return {"input_ids": words, "labels": words}


def trainer(folder: Path, **options: Any) -> tuple[hf.Trainer, PruningCallback]:
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    blocks = find_blocks(model, {"input_ids": WORDS})[2:]  # a layer stays in any case
    given = {"dataset_size": 48 * 8, "log_gamma": -60.0, "theta": 0.5, "theta_lr": 0.03}
    callback = PruningCallback(Pruner(model, optimizer, blocks=blocks, **given), finalize_at=0.75)
    args = hf.TrainingArguments(
        output_dir=str(folder),
        max_steps=24,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        save_steps=12,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1000,
        **options,
    )
    run = hf.Trainer(model, args, train_dataset=Lines(), optimizers=(optimizer, None), callbacks=[callback])
    return run, callback


def test_the_scaler_of_mixed_precision_reaches_the_pruner(tmp_path):
    run, callback = trainer(tmp_path)
    scaler = torch.amp.GradScaler("cpu")
    wrapped = SimpleNamespace(scaler=scaler, optimizer=callback.pruner.optimizer)
    callback.on_train_begin(run.args, run.state, run.control, optimizer=wrapped)
    assert callback.pruner.grad_scaler is scaler
    assert callback.pruner._before.grad_scaler is scaler


def test_the_trainer_prunes_and_resumes_where_it_stopped(tmp_path):
    first, callback = trainer(tmp_path / "a")
    first.train()
    pruner = callback.pruner
    assert pruner.num_steps == 24
    assert pruner.finalized
    assert pruner.events
    again, resumed = trainer(tmp_path / "b")
    checkpoint = tmp_path / "a" / "checkpoint-12"
    with pytest.raises(RuntimeError, match=r"callback\.resume"):
        again.train(resume_from_checkpoint=str(checkpoint))
    again, resumed = trainer(tmp_path / "b")
    resumed.resume(checkpoint)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.pruner.events == pruner.events
    ours, theirs = again.model.state_dict(), first.model.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.allclose(ours[k], theirs[k], atol=1e-6) for k in ours)
    net = pruner.finish()
    assert sum(p.numel() for p in net.parameters()) < sum(p.numel() for p in gpt2().parameters())


def test_the_best_checkpoint_is_not_loaded_into_what_is_left(tmp_path):
    run, _ = trainer(tmp_path)
    run.args.load_best_model_at_end = True
    with pytest.raises(ValueError, match="load_best_model_at_end"):
        run.train()
