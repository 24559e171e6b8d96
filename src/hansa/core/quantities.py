"""Quantities: the named types of numbers in the fields of parts, each with its limits and its owner's default range.

Few samples per step, few steps and a large rate make a reply a question about single samples; many steps are work;
huge factors overflow. The default ranges refuse that and no honest job. An owner narrows them in `[ranges]`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from hansa.core.fields import Owner

MOST = 1e6  # of factors and rates
MANY = 10**9  # samples, parties and places
LARGEST = 2**53  # whole numbers that float64 counts

FACTORS = Owner(0, MOST)
WORKLOAD = Owner(harmless="counted by [limits] before the work begins")
SIZED = Owner(harmless="its reply is measured before the work begins (limits.memory)")
CHECKED = Owner(harmless="the part itself refuses other values")
EVALUATED = Owner(harmless="evaluate.numbers and evaluate.groups bound the numbers of an evaluation")
SEEDS = Owner(harmless="it seeds draws of samples or places; with a privacy floor a party draws by a secret of its own")
OF_MODELS = Owner(harmless="the fusion itself refuses values that do not fit the number of models")
ENDS = Owner(harmless="it ends the party's own work sooner or later")
KEY_BITS = Owner(1024, 16_384)
SUM_RANGES = Owner(2.0**-20, 2.0**40)

# Training
Rate = Annotated[float, Meta(gt=0, description="a learning rate"), FACTORS]
Factor = Annotated[float, Meta(ge=0, description="the strength of a term"), FACTORS]
PositiveFactor = Annotated[float, Meta(gt=0, description="the strength of a term"), FACTORS]
Momentum = Annotated[float, Meta(ge=0, lt=1, description="the share of the last step in the next"), Owner(0, 1)]
Remembered = Annotated[float, Meta(ge=0, lt=1, description="the share of the last mean in the next"), CHECKED]
Elasticity = Annotated[float, Meta(gt=0, lt=1, description="the part of the way to a centre"), FACTORS]
Mixing = Annotated[float, Meta(ge=0, le=1, description="the weight of one of two models"), FACTORS]
HeldOut = Annotated[float, Meta(gt=0, lt=1, description="the share of samples kept out of training"), Owner(0, 1)]
SumDivisor = Annotated[float, Meta(gt=0, description="samples by which a sum is divided"), Owner(0, MANY)]
BatchSize = Annotated[int, Meta(ge=1, description="samples"), Owner(1, MANY)]
Epochs = Annotated[int, Meta(ge=1, description="passes over a party's samples"), WORKLOAD]
Steps = Annotated[int, Meta(ge=1, description="batches"), WORKLOAD]
ExtraEpochs = Annotated[int, Meta(ge=1, description="passes over a party's samples"), Owner(0, 10_000)]
Fraction = Annotated[float, Meta(ge=0, le=1), Owner(0, 1)]
Share = Annotated[float, Meta(gt=0, le=1), Owner(0, 1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1), Owner(0, 1)]
Gamma = Annotated[float, Meta(gt=0), Owner(0, 1e9)]

# Protection
Sigma = Annotated[float, Meta(ge=0, description="noise, in units of the sensitivity"), FACTORS]
Norm = Annotated[float, Meta(gt=0, description="the largest norm"), Owner(1e-9, 1e9)]
Delta = Annotated[float, Meta(gt=0, lt=1, description="of (epsilon, delta)-differential privacy"), Owner(0, 1)]
Epsilon = Annotated[float, Meta(gt=0), Owner(harmless="the job's own budget; privacy.epsilon is the owner's")]
SumRange = Annotated[float, Meta(gt=0), SUM_RANGES]
Weight = Annotated[int, Meta(ge=1, le=LARGEST, description="samples"), Owner(1, LARGEST)]

# Sizes and counts
Count = Annotated[int, Meta(ge=1), Owner(1, MANY)]
AnyCount = Annotated[int, Meta(ge=0), Owner(0, MANY)]
Length = Annotated[int, Meta(ge=0), Owner(1, MANY)]
Some = Annotated[int, Meta(ge=0), Owner(0, 100_000)]
CodeBits = Annotated[int, Meta(ge=2, le=8), Owner(1, 64)]
Size = Annotated[int, Meta(ge=0), SIZED]
SomeSize = Annotated[int, Meta(ge=1), SIZED]
Layers = Annotated[int, Meta(ge=0, description="layers of a model"), Owner(0, 100_000)]
SampleCount = Annotated[int, Meta(ge=1, description="samples"), WORKLOAD]
Seed = Annotated[int, SEEDS]

# Others
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Work = Annotated[int, Meta(ge=0), WORKLOAD]
AskNumber = Annotated[int, Meta(ge=0), Owner(harmless="it numbers the asks of a tree, each with its own noise")]
Parties = Annotated[int, Meta(ge=1), WORKLOAD]
Models = Annotated[int, Meta(ge=0), OF_MODELS]
TrimmedShare = Annotated[float, Meta(ge=0, lt=0.5, description="of the values at each end"), OF_MODELS]
Decay = Annotated[float, Meta(gt=0, le=1), CHECKED]
Round = Annotated[int, Meta(ge=1, description="of a run, from 1"), CHECKED]
Portion = Annotated[float, Meta(ge=0, le=1), CHECKED]
ColumnValue = Annotated[float, EVALUATED]
ClassNumber = Annotated[int, Meta(ge=0, description="of a class, from 0"), EVALUATED]
ColumnNumber = Annotated[int, EVALUATED]
Centre = Annotated[float, Owner(harmless="it shifts sums of targets by a known number")]
Components = Annotated[int, Meta(ge=1), Owner(1, 100_000)]
SmallTerm = Annotated[float, Meta(gt=0), Owner(harmless="it only makes steps of Adam shorter")]
Iterations = Annotated[int, Meta(ge=1), Owner(1, 100_000)]
PastRounds = Annotated[int, Meta(ge=1), Owner(1, 10_000)]
Noise = Annotated[float, Owner(0, 2.0**60)]
Patience = Annotated[int, Meta(ge=1), ENDS]
Tolerance = Annotated[float, Meta(ge=0), ENDS]
Precision = Annotated[float, Meta(gt=0, description="of a belief"), Owner(0, 2.0**60)]
Exponent = Annotated[float, Meta(ge=0), Owner(0, 1000)]
Quorum = Annotated[int, Meta(ge=0), Owner(0, 1000)]
Repeats = Annotated[int, Meta(ge=1), Owner(1, 1_000_000)]
Wide = Annotated[float, Owner(0, 1e9)]
Sweeps = Annotated[int, Meta(ge=0), Owner(0, 10_000)]

# Settings of runs, parties and aggregators, which no request has
Amount = Annotated[float, Meta(ge=0)]
Multiple = Annotated[float, Meta(ge=1)]
PerSecond = Annotated[float, Meta(gt=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0, description="seconds")]
