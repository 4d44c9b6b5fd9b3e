"""Federated LoRA of a text classifier on a CSV file of 20 clients, with client-level differential privacy, epsilon 8.

python examples/fine_tuning_text.py    (needs torch, transformers and peft)

The file, the tokenizer and the weights are made here, so that the example runs offline: replace the three marked lines
by your own file and by the directory of a pretrained model.
"""

import csv
import random

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedTokenizerFast

from fedrax import FedAvg, Federation, LocalSGD, classification, simulate, tree
from fedrax.data import Natural, load
from fedrax.models import from_torch
from fedrax.privacy import Accountant, ClientDP, Flat
from fedrax.simulation import use_all_cores

use_all_cores()  # before the first array of JAX
torch.manual_seed(0)
rng = random.Random(0)

# A table with the columns shop, review and liked.
opinions = {"yes": ["good", "great", "lovely"], "no": ["bad", "awful", "dull"]}
filling = ["the", "a", "this", "food", "room", "staff", "place", "was", "is", "very", "really", "quite", "we", "they"]
with open("reviews.csv", "w", newline="") as file:  # <- your file
    table = csv.writer(file)
    table.writerow(["shop", "review", "liked"])
    for number in range(1000):
        liked = rng.choice(["yes", "no"])
        words = [*rng.choices(filling, k=rng.randint(3, 10)), rng.choice(opinions[liked])]
        table.writerow([f"shop {number % 20}", " ".join(words), liked])

words = ["[PAD]", "[UNK]", *filling, *opinions["yes"], *opinions["no"]]
vocabulary = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="[PAD]", unk_token="[UNK]")
tokenizer.save_pretrained("model")  # <- the directory of a pretrained model

# The samples: tokens and their mask. Each shop is a client and keeps a fifth of its rows for the test.
options = {"label": "liked", "client": "shop", "texts": ["review"], "tokenizer": "model", "length": 12}
data = load("csv", path="reviews.csv", **options)
federation = Federation.from_dataset(data, Natural(), seed=0)
print(federation)

# The model with its adapters; peft sets which parameters are trained.
config = DistilBertConfig(vocab_size=len(words), max_position_embeddings=12, dim=32, n_layers=1, n_heads=2,
                          hidden_dim=64, num_labels=2, dropout=0.0, attention_dropout=0.0)  # fmt: skip
network = DistilBertForSequenceClassification(config)  # <- .from_pretrained("model", num_labels=2)
adapters = LoraConfig(r=4, target_modules=["q_lin", "v_lin"], modules_to_save=["pre_classifier", "classifier"])
example = {name: array[:4] for name, array in federation.train.x.items()}
model = from_torch(get_peft_model(network, adapters), example)
task = classification(model, metrics=["f1"], class_names=federation.class_names)

# Noise by which 30 rounds with all 20 clients are (8, 1/400)-differentially private for a client.
rounds, delta = 30, 1 / 20**2  # delta well below 1/20, the share of one client
local = LocalSGD(lr=0.1, epochs=1, batch_size=10)
unit = ClientDP(FedAvg(local=local), clip=Flat(1.0), noise=1.0)
noise = Accountant(unit.releases(), delta).factor_for(8.0, rounds)
method = ClientDP(FedAvg(local=local), clip=Flat(1.0), noise=noise)
result = simulate(method, task, federation, rounds=rounds, cohort_size=20, delta=delta, epsilon_budget=8.0)

last = result.events[-1]
whole, sent = sum(p.numel() for p in model.module.parameters()), tree.num_bytes(result.params) // 4
print(f"{sent:,} of {whole:,} parameters are trained and sent; noise {noise:.2f}, epsilon {last['epsilon']:.2f}")
print(f"test accuracy {last['test_accuracy']:.2f}, F1 {last['test_f1']:.2f}")
model.to_torch(result).save_pretrained("adapters")  # for peft.PeftModel.from_pretrained(network, "adapters")
