"""Write hospitals.csv: simulated admissions of 23 hospitals, with string columns and missing values.

python examples/hospitals.py

Hospitals differ in size, patients and mortality. Five of them report lactate in mg/dL, the others in mmol/L.
"""

import csv
import math

import numpy as np

HOSPITALS = [
    "Alder",
    "Ash",
    "Aspen",
    "Beech",
    "Birch",
    "Cedar",
    "Chestnut",
    "Cypress",
    "Elm",
    "Fir",
    "Hawthorn",
    "Hazel",
    "Holly",
    "Juniper",
    "Larch",
    "Linden",
    "Maple",
    "Oak",
    "Pine",
    "Poplar",
    "Rowan",
    "Spruce",
    "Willow",
]
WARDS = ("surgery", "medicine", "cardiology", "intensive care")
RISK = {"surgery": -0.4, "medicine": 0.0, "cardiology": 0.3, "intensive care": 1.2}
COLUMNS = ("hospital", "age", "sex", "ward", "systolic", "creatinine", "lactate", "died")

rng, rows, deaths = np.random.default_rng(23), 0, 0
with open("hospitals.csv", "w", newline="") as file:
    table = csv.writer(file)
    table.writerow(COLUMNS)
    for number, name in enumerate(HOSPITALS):
        mix = rng.dirichlet(np.full(len(WARDS), 0.6))
        level, older, milligrams = rng.normal(0, 0.7), rng.normal(0, 8), number % 5 == 0
        for _ in range(rng.integers(30, 130)):
            ward = str(rng.choice(WARDS, p=mix))
            age = int(np.clip(rng.normal(66 + older, 14), 18, 99))
            systolic, creatinine = rng.normal(128, 22), rng.lognormal(4.5, 0.4)
            lactate = rng.lognormal(0.5 + 0.4 * (ward == "intensive care"), 0.5)
            risk = level - 1 + RISK[ward] + 0.05 * (age - 66) - 0.02 * (systolic - 128) + 0.9 * (lactate - 1.8)
            risk += 0.012 * (creatinine - 90)
            died = bool(rng.random() < 1 / (1 + math.exp(-risk)))
            rows, deaths = rows + 1, deaths + died
            shown = {
                "systolic": f"{systolic:.0f}",
                "creatinine": f"{creatinine:.0f}" if rng.random() > 0.1 else "",
                "lactate": f"{lactate * (9.01 if milligrams else 1):.1f}" if rng.random() > 0.2 else "",
            }
            sex = str(rng.choice(["f", "m", ""], p=[0.48, 0.48, 0.04]))
            table.writerow([name, age, sex, ward, *shown.values(), "yes" if died else "no"])
print(f"hospitals.csv: {rows:,} admissions; always predicting 'no' has an accuracy of {1 - deaths / rows:.3f}")
