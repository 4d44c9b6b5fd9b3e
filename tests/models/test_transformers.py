"""Federated LoRA of transformers and peft agrees with a PyTorch loop on the same batches."""

from __future__ import annotations

import copy
import re
import runpy
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from fedrax import FedAvg, Federation, FedraxError, FedraxWarning, LocalSGD, classification, simulate, tree  # noqa: E402
from fedrax.data import encode_texts, load, next_tokens  # noqa: E402
from fedrax.models import from_torch  # noqa: E402

SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CLIENTS, ROWS, ROUNDS, LR = 3, 8, 3, 0.1


class Wrapped(torch.nn.Module):
    def __init__(self, network: Any, name: str, targets: list[str], head: str):
        super().__init__()
        self.name = name
        lora = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=targets, modules_to_save=[head])
        self.network = peft.get_peft_model(network, lora)

    def forward(self, x: Any) -> Any:
        return self.network(**{self.name: x}).logits


def bert() -> Wrapped:
    config = transformers.BertConfig(vocab_size=30, num_labels=3, **SIZE, **NO_DROPOUT)
    network = transformers.BertForSequenceClassification(config)
    return Wrapped(network, "input_ids", ["query", "value"], "classifier")


def gpt2() -> Wrapped:
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=30, n_positions=8, n_embd=16, n_layer=2, n_head=2, num_labels=3, **none)
    config.pad_token_id = 0
    return Wrapped(transformers.GPT2ForSequenceClassification(config), "input_ids", ["c_attn"], "score")


def llama() -> Wrapped:
    config = transformers.LlamaConfig(vocab_size=30, num_key_value_heads=2, num_labels=3, pad_token_id=0, **SIZE)
    return Wrapped(transformers.LlamaForSequenceClassification(config), "input_ids", ["q_proj", "v_proj"], "score")


def vit() -> Wrapped:
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **SIZE, **NO_DROPOUT)
    network = transformers.ViTForImageClassification(config)
    named = [name for name, part in network.named_modules() if isinstance(part, torch.nn.Linear)]
    first = [name.split(".")[-1] for name in named if "attention" in name][0:3:2]  # of queries and values
    return Wrapped(network, "pixel_values", first, "classifier")


def masked_bert() -> Any:
    """A model of peft itself, which takes tokens and their mask by name."""
    config = transformers.BertConfig(vocab_size=30, num_labels=3, **SIZE, **NO_DROPOUT)
    lora = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
    return peft.get_peft_model(transformers.BertForSequenceClassification(config), lora)


def logits_of(net: Any, x: Any) -> Any:
    """The outputs for a batch of NumPy arrays."""
    if isinstance(x, dict):
        return net(**{name: torch.as_tensor(a).long() for name, a in x.items()}).logits
    return net(torch.as_tensor(x) if x.dtype == np.float32 else torch.as_tensor(x).long())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("saved", [(), ("classifier",), ("classifier", "pooler")])
def test_large_saved_modules_are_warned_of(saved: tuple[str, ...], recwarn: pytest.WarningsRecorder):
    config = transformers.BertConfig(vocab_size=30, num_labels=3, **SIZE, **NO_DROPOUT)
    lora = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=list(saved) or None)
    module = peft.get_peft_model(transformers.BertForSequenceClassification(config), lora)
    from_torch(module, {"input_ids": np.ones((2, 6), np.int32)})
    found = [str(w.message) for w in recwarn if issubclass(w.category, FedraxWarning)]
    if "pooler" not in saved:  # 51 values of a classifier, and 2 * 2 * (2 * 16 * 2) of the adapters
        assert not found
    else:
        (message,) = found
        assert "323 values of whole modules beside 256 of the adapters: bert.pooler (272), classifier (51);" in message


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [bert, masked_bert, gpt2, llama, vit])
def test_rounds_agree_with_a_pytorch_loop(make: Any):
    torch.manual_seed(0)
    module = make()
    rng = np.random.default_rng(0)
    shape = (3, 8, 8) if make is vit else (6,)
    x: Any = rng.normal(size=(CLIENTS * ROWS, *shape)) if make is vit else rng.integers(1, 30, (CLIENTS * ROWS, *shape))
    x = x.astype(np.float32 if make is vit else np.int32)
    if make is masked_bert:
        mask = (np.arange(6) < rng.integers(2, 7, (CLIENTS * ROWS, 1))).astype(np.int32)
        x = {"input_ids": x * mask, "attention_mask": mask}
    part = lambda start, end: jax.tree.map(lambda a: a[start:end], x)  # noqa: E731
    y = rng.integers(0, 3, CLIENTS * ROWS)
    offsets = np.arange(0, CLIENTS * ROWS + 1, ROWS)
    federation = Federation.from_arrays(x, y, offsets=offsets, shuffle=False, test=(part(0, 4), y[:4]))
    local = LocalSGD(steps=2, batch_size=4, order="stored", lr=LR)
    model = from_torch(module, part(0, 4))
    result = simulate(FedAvg(local=local), classification(model), federation, rounds=ROUNDS, cohort_size=CLIENTS)

    trained = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
    for _ in range(ROUNDS):
        ends = []
        for client in range(CLIENTS):
            net = copy.deepcopy(module).train()
            net.load_state_dict(trained, strict=False)
            optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=LR)
            for start in range(client * ROWS, (client + 1) * ROWS, 4):
                outputs = logits_of(net, part(start, start + 4))
                loss = torch.nn.functional.cross_entropy(outputs, torch.as_tensor(y[start : start + 4]))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            ends.append({name: p.detach() for name, p in net.named_parameters() if name in trained})
        trained = {name: torch.stack([end[name] for end in ends]).mean(0) for name in trained}

    found = dict(model.to_torch(result).named_parameters())
    for name, value in trained.items():
        np.testing.assert_allclose(found[name].detach().numpy(), value.numpy(), atol=1e-5, err_msg=name)
    numbers = sum(value.numel() for value in trained.values())
    assert tree.num_bytes(result.params) == 4 * numbers
    assert result.events[-1]["bytes_up"] == ROUNDS * CLIENTS * 4 * numbers


TEXTS = ["the dog sleeps", "a dog", "the cat and the dog sleep", "cat"]
WORDS = ["[PAD]", "[UNK]", *sorted({word for text in TEXTS for word in text.split()})]


def tokenizer(**options: Any) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]"} | options
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **named)


def test_texts_are_encoded_as_the_tokenizer_pads_them(tmp_path: Path):
    own = tokenizer(model_max_length=5)
    for length, pairs in ((None, None), (4, None), (8, TEXTS[::-1])):
        encoded = encode_texts(TEXTS, own, pairs=pairs, length=length)
        longest = {"padding": "longest"} if length is None else {"padding": "max_length", "max_length": length}
        expected = own(TEXTS, pairs, truncation=True, return_tensors="np", **longest)
        assert encoded.keys() == expected.keys()
        for name, array in encoded.items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)
    own.save_pretrained(tmp_path / "own")
    rows = [f"{text},{i % 2}" for i, text in enumerate(TEXTS)]
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *rows]))
    read: dict[str, Any] = {"path": tmp_path / "texts.csv", "texts": ["text"], "test_fraction": 0.0}
    data = load("csv", tokenizer=str(tmp_path / "own"), **read)
    jax.tree.map(np.testing.assert_array_equal, data.train.x, encode_texts(TEXTS, own))
    with pytest.raises(FedraxError, match="has no tokenizer of transformers"):
        load("csv", tokenizer=str(tmp_path), **read)
    with pytest.raises(FedraxError, match="'modle' is neither a directory nor in the local cache of transformers"):
        load("csv", tokenizer="modle", **read)
    with pytest.raises(FedraxError, match="min_count and largest have no effect"):
        load("csv", tokenizer=str(tmp_path / "own"), min_count=2, **read)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_perplexity_of_a_language_model_is_that_of_transformers():
    x = encode_texts(TEXTS, tokenizer())
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=len(WORDS), n_positions=8, n_embd=16, n_layer=1, n_head=2, **none)
    torch.manual_seed(0)
    network = transformers.GPT2LMHeadModel(config)
    y = next_tokens(x)
    federation = Federation.from_arrays(x, y, [0, 0, 1, 1], test=(x, y), num_classes=len(WORDS), padding=-1)
    task = classification(from_torch(network, x), padding=-1, metrics=["perplexity"])
    found = simulate(FedAvg(), task, federation, rounds=0, cohort_size=2, eval_first=True).events[-1]
    given = {name: torch.as_tensor(a).long() for name, a in x.items()}
    labels = torch.where(given["attention_mask"] > 0, given["input_ids"], -100)
    with torch.no_grad():
        expected = network.eval()(**given, labels=labels).loss.exp().item()
    assert found["test_perplexity"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_texts_of_another_model_are_one_clear_sentence():
    config = transformers.BertConfig(vocab_size=9, max_position_embeddings=6, num_labels=2, **SIZE, **NO_DROPOUT)
    network = transformers.BertForSequenceClassification(config)
    mask = np.ones((4, 6), np.int32)
    with pytest.raises(FedraxError, match="texts have 7 tokens, and the model 6 positions: shorten them to 6"):
        from_torch(network, {"input_ids": np.ones((4, 7), np.int32), "attention_mask": np.ones((4, 7), np.int32)})
    with pytest.raises(FedraxError, match="there is a token 9, and the model has 9 words: use the model's own"):
        from_torch(network, {"input_ids": 9 * mask, "attention_mask": mask})
    model = from_torch(network, {"input_ids": mask, "attention_mask": mask})
    ids = mask.copy()
    ids[3, 2] = 12
    federation = Federation.from_arrays({"input_ids": ids, "attention_mask": mask}, [0, 1, 0, 1], [0, 0, 1, 1])
    with pytest.raises(FedraxError, match=r"x\['input_ids'\] of 'arrays' holds integers from 1 to 12, by which"):
        simulate(FedAvg(), classification(model), federation, rounds=1, cohort_size=2)
    with pytest.raises(FedraxError, match="of its example, x_attention_mask, x_input_ids, not x_input_ids, x_tok"):
        model.apply(model.init(jax.random.key(0)), {"input_ids": mask, "token_type_ids": mask})


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_the_recipe_keeps_its_privacy_budget_and_its_adapters_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    made = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "fine_tuning_text.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "20 clients" in printed and "epsilon" in printed
    epsilon = float(re.findall(r"epsilon ([\d.]+)", printed)[0])
    assert 7 < epsilon <= 8 and made["result"].stopped == "rounds"
    torch.manual_seed(0)  # as in the example: a new model of the same weights
    network = transformers.DistilBertForSequenceClassification(made["config"])
    loaded, x = peft.PeftModel.from_pretrained(network, "adapters").eval(), made["example"]
    with torch.no_grad():
        expected = logits_of(loaded, x).numpy()
    np.testing.assert_allclose(made["result"].predict(x), expected, rtol=1e-4, atol=1e-4)
