"""Federated LoRA of transformers and peft agrees with a PyTorch loop on the same batches."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from fedrax import FedAvg, Federation, LocalSGD, classification, simulate, tree  # noqa: E402
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


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [bert, gpt2, llama, vit])
def test_rounds_agree_with_a_pytorch_loop(make: Any):
    torch.manual_seed(0)
    module = make()
    rng = np.random.default_rng(0)
    shape = (3, 8, 8) if make is vit else (6,)
    x: Any = rng.normal(size=(CLIENTS * ROWS, *shape)) if make is vit else rng.integers(1, 30, (CLIENTS * ROWS, *shape))
    x = x.astype(np.float32 if make is vit else np.int32)
    y = rng.integers(0, 3, CLIENTS * ROWS)
    offsets = np.arange(0, CLIENTS * ROWS + 1, ROWS)
    federation = Federation.from_arrays(x, y, offsets=offsets, shuffle=False, test=(x[:4], y[:4]))
    local = LocalSGD(steps=2, batch_size=4, order="stored", lr=LR)
    model = from_torch(module, x[:4])
    result = simulate(FedAvg(local=local), classification(model), federation, rounds=ROUNDS, cohort_size=CLIENTS)

    trained = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
    for _ in range(ROUNDS):
        ends = []
        for client in range(CLIENTS):
            net = copy.deepcopy(module).train()
            net.load_state_dict(trained, strict=False)
            optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=LR)
            for start in range(client * ROWS, (client + 1) * ROWS, 4):
                batch = torch.as_tensor(x[start : start + 4])
                batch = batch if make is vit else batch.long()
                loss = torch.nn.functional.cross_entropy(net(batch), torch.as_tensor(y[start : start + 4]))
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
