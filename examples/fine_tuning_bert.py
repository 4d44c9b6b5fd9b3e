"""Federated fine-tuning of a BERT classifier of Hugging Face's transformers with LoRA adapters of peft.

python examples/fine_tuning_bert.py    (needs torch, transformers and peft)

The weights are random and the model is small, so that the example runs offline; from_pretrained("bert-base-uncased")
loads real ones.
"""

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

from fedrax import FedAvg, Federation, LocalSGD, classification, simulate, tree
from fedrax.models import from_torch
from fedrax.simulation import use_all_cores

use_all_cores()  # before the first array of JAX
torch.manual_seed(0)


class Classifier(torch.nn.Module):
    """From token numbers [B, T], 0 for padding, to logits [B, classes]."""

    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            num_labels=2,
        )
        bert = BertForSequenceClassification(config)
        adapters = LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["classifier"])
        self.bert = get_peft_model(bert, adapters)  # sets requires_grad

    def forward(self, tokens):
        return self.bert(input_ids=tokens, attention_mask=tokens != 0).logits


# Sentences of 12 tokens and more or less padding; the label is whether a word is among them.
rng = np.random.default_rng(0)
tokens = rng.integers(2, 50, (600, 12)).astype(np.int32)
tokens[np.arange(12) >= rng.integers(6, 13, (600, 1))] = 0
labels = (tokens == 7).any(1) | (tokens == 9).any(1)
clients = np.arange(500) % 5
test = tokens[500:], labels[500:].astype(int)
federation = Federation.from_arrays(tokens[:500], labels[:500].astype(int), clients, test=test)

module = Classifier()
model = from_torch(module, tokens[:4])
method = FedAvg(local=LocalSGD(lr=0.3, epochs=1, batch_size=10, momentum=0.9))
result = simulate(method, classification(model), federation, rounds=5, cohort_size=5)
whole, sent = sum(p.numel() for p in module.parameters()), tree.num_bytes(result.params) // 4
print(f"{sent:,} of {whole:,} parameters are trained and sent; test accuracy {result.events[-1]['test_accuracy']:.2f}")
trained = model.to_torch(result)  # the module, with its trained adapters
