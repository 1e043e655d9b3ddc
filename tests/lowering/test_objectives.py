"""Models of other objectives in library mode: roles that a run of the trainer would infer, at TP2 against HF."""

import pytest
import torch
import transformers

from megasched.verify.ranks.pool import init_megatron
from tests.lowering.models import auto, randomize
from tests.lowering.parity import compare_gradients, distance, scheduled_copy, too_far

_BERT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_VIT = {"image_size": 8, "patch_size": 4, "num_channels": 3, "num_labels": 6}
_NEO = {
    **{"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4},
    **{"max_position_embeddings": 32, "attention_types": [[["global", "local"], 1]], "window_size": 5},
    **{"resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0},
}
_T5 = {
    "vocab_size": 100,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
# Model type -> its class, fields of its config, and how many of its parameters are cut.
MODELS = {
    "bert": ("BertForMaskedLM", _BERT, 20),
    "roberta": ("RobertaForMaskedLM", _BERT, 20),
    "albert": ("AlbertForMaskedLM", {**_BERT, "embedding_size": 16}, 10),
    "gpt_neo": ("GPTNeoForCausalLM", _NEO, 15),
    "t5": ("T5ForConditionalGeneration", {**_T5, "decoder_start_token_id": 0}, 35),
    "vit": ("ViTForImageClassification", {**_BERT, **_VIT}, 20),
}


def model_of(name):
    kind, fields, _ = MODELS[name]
    config = transformers.AutoConfig.for_model(name, **fields, use_cache=False)
    return randomize(getattr(transformers, kind)(config)).train()


def _batch(name):
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(4, 100, (2, 12), generator=generator)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator), "labels": labels[:, 0] % 6}
    return {"input_ids": torch.randint(4, 100, (2, 12), generator=generator), "labels": labels}


def _compared(name, sequence_parallel=False):
    init_megatron(tp=2)
    model, batch = model_of(name), _batch(name)
    built, plan, _ = scheduled_copy(model, auto, sequence_parallel=sequence_parallel)
    wanted, found = model(**batch), built(**batch)
    wanted.loss.backward()
    found.loss.backward()
    gaps = {"loss": distance(found.loss, wanted.loss), "logits": distance(found.logits, wanted.logits)}
    cut = sum(placement.sharded for placement in plan.placements.values())
    return cut, too_far({**gaps, **compare_gradients(built, plan, model)})


@pytest.mark.parametrize("name", MODELS)
def test_auto_cuts_what_the_trainer_would_and_equals_hf(ranks, name):
    assert ranks.run(2, _compared, name) == [(MODELS[name][2], {})] * 2


@pytest.mark.parametrize("name", ["bert", "gpt_neo", "t5"])
def test_layers_on_parts_of_the_sequence_equal_hf(ranks, name):
    assert ranks.run(2, _compared, name, sequence_parallel=True) == [(MODELS[name][2], {})] * 2


def test_hf_classes_have_the_objective_of_their_name():
    from megasched.definition.objectives import objective_of

    wanted = {"bert": "masked_lm", "gpt_neo": "causal_lm", "t5": "seq2seq_lm", "vit": "image_classification"}
    assert {name: objective_of(model_of(name)).name for name in wanted} == wanted
    assert objective_of(torch.nn.Linear(2, 2)).name == "causal_lm"
