"""Two federations of real hospitals: heart disease at four of them, and what 3,337 of them charge.

How a column becomes a number is declared here, from medical and public knowledge, before any record is seen (but for
the "kinds" of procedures, which were put together with these published charges in view).
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch

from fairveil.data.archive import Archive, Asset, Stored
from fairveil.data.columns import Category, Declared, Range, prepare
from fairveil.data.federation import Federation, Records
from fairveil.data.partition import TestFraction, owned

if TYPE_CHECKING:
    import pandas as pd

HEART = Archive(
    name="heart-disease",
    folder="heart_disease_4hospitals",
    assets=(Asset("heart_disease.csv", "0b0af698061f2fda8501777db91a33d0f449690c642e28e625cb193ebe5d01a7", 60109),),
    records=920,
    licence="CC BY 4.0",
    source="The processed files of the four hospitals in the UCI repository (Janosi, Steinbrunn, Pfisterer, Detrano, "
    "Heart Disease, 1989), one below the other as one CSV with a column `hospital`.",
)
CHARGES = Archive(
    name="hospital-charges",
    folder="cms_ipps_2011",
    assets=(
        Asset("cms_ipps_fy2011.parquet", "e96d66a9f8ca497d6c7afefb403daeedca0c3d9d0a4a8c0dfcc3aaef0cbffa73", 4653898),
    ),
    records=163_065,
    licence="public domain (US Government)",
    source="Inpatient charge data of the fiscal year 2011, Centers for Medicare and Medicaid Services, as one parquet "
    "file.",
)


AGES = {0: "below 45", 45: "45 to 54", 55: "55 to 64", 65: "65 and above"}  # from which age on


class HeartDisease(Stored):
    """920 patients at four hospitals: has a patient heart disease? 13 measurements; many are missing, by hospital.

    Sex and age band are sensitive attributes of every patient: fairness.groups may be "sex" or "age".

    The hospitals are the clients, and each is a group: Cleveland, Budapest ("hungarian"), Zurich and Basel
    ("switzerland"), Long Beach ("va"). A cholesterol or blood pressure of 0 means that it was not measured.

    Attributes:
        target: "presence" of disease (num > 0), or its "severity" (num, 0 to 4).
        test_fraction: share of each hospital's patients kept for testing.
    """

    archive: ClassVar[Archive] = HEART
    # Wide clinical ranges and the codes of the documentation: public knowledge, not statistics of these patients.
    COLUMNS: ClassVar[dict[str, Declared]] = {
        "age": Range(low=20, high=90),
        "sex": Range(low=0, high=1),
        "cp": Category(values=(1, 2, 3, 4)),
        "trestbps": Range(low=80, high=200, missing=(0,)),
        "chol": Range(low=100, high=400, missing=(0,)),
        "fbs": Range(low=0, high=1, missing=()),
        "restecg": Category(values=(0, 1, 2), missing=()),
        "thalach": Range(low=60, high=220, missing=()),
        "exang": Range(low=0, high=1, missing=()),
        "oldpeak": Range(low=-3, high=7, missing=()),
        "slope": Category(values=(1, 2, 3), missing=()),
        "ca": Range(low=0, high=3, missing=()),
        "thal": Category(values=(3, 6, 7), missing=()),
    }
    target: Literal["presence", "severity"] = "presence"
    test_fraction: TestFraction = 0.2

    def load(self, seed: int) -> Federation:
        """Four clients; 32 features, each within [-1, 1]."""
        import pandas as pd  # slow to import

        table = pd.read_csv(io.BytesIO(self.file("heart_disease.csv")))
        prepared = prepare({name: table[name] for name in self.COLUMNS}, list(self.COLUMNS), self.COLUMNS)
        client, names = pd.factorize(table["hospital"], sort=True)
        severity = table["num"].to_numpy().astype(np.int64)
        y = severity if self.target == "severity" else (severity > 0).astype(np.int64)
        return owned(
            "heart-disease", Records(torch.from_numpy(prepared.x), torch.from_numpy(y)), client.astype(np.int64),
            classes=5 if self.target == "severity" else 2, test_fraction=self.test_fraction, seed=seed,
            group=np.arange(len(names)), groups=tuple(names), names=tuple(names), record="one patient",
            public=prepared.public,
            attributes={
                "sex": ((table["sex"].to_numpy() > 0).astype(np.int64), ("female", "male")),
                "age": (np.digitize(table["age"].to_numpy(), list(AGES)) - 1, tuple(AGES.values())),
            },
        )  # fmt: skip


REGIONS = {  # of the US Census Bureau
    "Northeast": "CT ME MA NH RI VT NJ NY PA",
    "Midwest": "IL IN MI OH WI IA KS MN MO NE ND SD",
    "South": "DE DC FL GA MD NC SC VA WV AL KY MS TN AR LA OK TX",
    "West": "AZ CO ID MT NV NM UT WY AK CA HI OR WA",
}
SIZES = {"small (below 20 procedures)": 0, "medium (20 to 59)": 20, "large (60 and more)": 60}  # from this many on
OPERATIONS = (39, *range(238, 255), 329, 330, 418, 419, 460, 469, 470, 473, 480, 481, 482, 491, 853)
IMPLANTS = (238, 243, 244, 246, 247, 249, 251, 460, 469, 470, 473)  # a device is implanted, or a vessel opened
VENTILATION = (207, 208, 870)
MAJOR, MINOR = r" W (?:CC/)?MCC", r" W CC(?!/)"  # complications, by the words of a definition
SEVERE = (177, 178, 329, 330, 853, 870, 871, 872)  # infections of lung or blood, and surgery of the bowel


class HospitalCharges(Stored):
    """What 3,337 US hospitals charge for 100 procedures: predict the logarithm of the average charge.

    A record is one hospital's average charge for one procedure (a diagnosis-related group), over at least 11 patients.
    The target is ln(charge) - 10: its error is relative, so an RMSE of 0.3 is about 30%. 95 hospitals have one record,
    and are not scored.

    Attributes:
        features: "each" place (51 states, a column of 0 and 1 each) and procedure (100 groups, a column of 0 and 5
            each: one in a hundred records has a given one, and with 0 and 1 its price would be learned far more slowly
            than the intercept). Or their "kinds", ten columns of 0 and 1: the four census regions; and of the
            procedure, whether it is an operation, implants a device or opens a vessel, ventilates, has major
            complications, has complications, is for a severe infection or on the bowel. A linear model of these has 11
            parameters, as many as the budgets in Galli, Jung, Biswas, Palamidessi, Cucinotta, "Advancing Personalized
            Federated Learning: Group Privacy, Fairness, and Beyond", 2023, are multiples of; which, it does not say.
        group: by which hospitals are compared: census "region", "state", or "size" (how many of the procedures).
        test_fraction: share of each hospital's records kept for testing.
    """

    archive: ClassVar[Archive] = CHARGES
    features: Literal["each", "kinds"] = "each"
    group: Literal["region", "state", "size"] = "region"
    test_fraction: TestFraction = 0.2

    def load(self, seed: int) -> Federation:
        """A client for each hospital."""
        import pandas as pd

        columns = ["provider_id", "provider_name", "provider_state", "code", "definition", "average_covered_charges"]
        table = pd.read_parquet(io.BytesIO(self.file("cms_ipps_fy2011.parquet")), columns=columns)
        client, providers = pd.factorize(table["provider_id"], sort=True)
        state, states = pd.factorize(table["provider_state"], sort=True)
        if self.features == "kinds":
            x = _kinds(_region(states)[state], table["code"], table["definition"])
        else:
            procedure, procedures = pd.factorize(table["code"], sort=True)
            rows = np.arange(len(table))
            x = np.zeros((len(table), len(states) + len(procedures)), dtype=np.float32)
            x[rows, state] = 1
            x[rows, len(states) + procedure] = 5
        y = (np.log(table["average_covered_charges"].to_numpy()) - 10).astype(np.float32)
        first = np.unique(client, return_index=True)[1]  # a row of each hospital
        group, groups = self._groups(states[state[first]], np.bincount(client))
        names = table["provider_name"].to_numpy()[first]
        kinds = {
            "the kinds of procedures": "read off the codes and definitions of the diagnosis-related groups, which CMS "
            "publishes; which of them to take was decided with a look at these charges, which are published too"
        }
        return owned(
            "hospital-charges", Records(torch.from_numpy(x), torch.from_numpy(y)), client.astype(np.int64), classes=0,
            test_fraction=self.test_fraction, seed=seed, group=group, groups=groups,
            names=tuple(f"{name} ({provider})" for name, provider in zip(names, providers, strict=True)),
            record="one hospital's average charge for one procedure, over at least 11 patients",
            public={
                "the lists of states and procedures": "published by CMS with the data",
                "the group of each hospital": "its state is known; its size class follows from its exact size",
            }
            | (kinds if self.features == "kinds" else {}),
        )  # fmt: skip

    def _groups(self, state: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
        """(clients,) the group of each hospital, and their names."""
        if self.group == "size":
            return np.searchsorted(list(SIZES.values()), size, side="right") - 1, tuple(SIZES)
        if self.group == "state":
            names, group = np.unique(state.astype(str), return_inverse=True)
            return group, tuple(names.tolist())
        return _region(state), tuple(REGIONS)


def _region(states: Iterable[str]) -> np.ndarray:
    """(states,) the number of each state's region."""
    region = {code: number for number, codes in enumerate(REGIONS.values()) for code in codes.split()}
    return np.array([region[code] for code in states])


def _kinds(region: np.ndarray, code: pd.Series, definition: pd.Series) -> np.ndarray:
    """(records, 10) float32 of 0 and 1: four regions, and six kinds of the procedure."""
    kinds = [
        code.isin(OPERATIONS), code.isin(IMPLANTS), code.isin(VENTILATION), definition.str.contains(MAJOR),
        definition.str.contains(MINOR), code.isin(SEVERE),
    ]  # fmt: skip
    return np.column_stack([region == number for number in range(len(REGIONS))] + kinds).astype(np.float32)
