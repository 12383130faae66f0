"""The placement plan: whether a composition fits devices, how many sequences it then holds, and what a token costs.

Everything here is arithmetic on what the files and the declaration say; no device is asked. `cache` counts what each
layer keeps of a sequence, `shards` which device holds which part of the weights, `ledger` adds up one device,
`topology` names layouts, `cost` has the formulas of time, capacity and price, and `plan` judges a composition.
Bytes are whole numbers and rates are exact: nothing is rounded before the last step, and then against the plan.
"""


class PlacementUnknown(ValueError):
    """Something that decides the plan is not known. It is never guessed, since a guess could say that it fits.

    `pointer` is the JSON Pointer or option that is missing or not understood.
    """

    def __init__(self, pointer: str, detail: str) -> None:
        super().__init__(f"{pointer}: {detail}")
        self.pointer, self.detail = pointer, detail
