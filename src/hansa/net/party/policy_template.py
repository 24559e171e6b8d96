"""The text of a new `party.toml`: all settings as comments, with their defaults."""

from __future__ import annotations

TOML = """\
# What this party takes part in. It gives a reason for each refusal, and the aggregator reports it.
# Names may have wildcards: "heart-*".
# jobs = ["*"]       # jobs by name
# ops = ["*"]        # operations on the data: "sgd", "evaluate", ... (`hansa parts op`, `hansa parts local`), and
#                    # transforms of updates: "int8", ... (`hansa parts transform`)
# models = ["*"]     # models that come with hansa or its plug-ins (`hansa models`)
# model = "small"    # the model that this party trains in jobs with several models, by its name in the job
# functions = []     # parts of your own that a job may name, as models, solvers, augmentations: ["my_models:net"];
#                    # nothing else is ever imported. Your own copy is used: no message carries code
# min_cohort = 1     # the smallest cohort in which this party's update may be summed; with privacy.active the party
#                    # counts the cohort itself, otherwise it trusts the aggregator's number
# min_rows = 1       # the fewest of this party's rows in a node of a tree whose sums it sends; the rows of a smaller
#                    # node are counted with those of its sibling
# matches = 0        # asks, over all jobs, that may read the ids of this party's rows, to match them with rows of other
#                    # parties: it reveals whom they have in common. 0 refuses jobs over columns.
#                    # A job takes one; of the leader (the party with the labels) it takes one per other party
# min_matches = 20   # the fewest people in common, in training rows and in test rows if any; with a floor 20, without
#                    # one 0. The party that leads a matching may leave out people: results would be about the others
# fuzzy = false      # whether they may also be matched by likeness (linkage): then the aggregator gets encodings of all
#                    # ids, which can be guessed by whoever knows the parties' key
# scores = false     # whether the operator may ask a joint model of this party for scores of people, by their ids. Each
#                    # such job counts as one of `matches`, and asks for at most limits.people people
# keep_replies = false   # whether a job may keep this party's replies after their rounds ([audit] keep_replies), for
#                    # attacks that measure what they reveal; nobody sees an aggregator that keeps them secretly
# class_weights = 1000.0    # a job may weigh classes in the training loss by 1/1000 to 1000; 1 refuses other weights
# max_bytes = 17179869184   # the largest message to fetch
# device = "cpu"     # where to train

# [privacy]          # the floor: the least protection of what leaves this party
# epsilon = 3.0      # the budget over all jobs, at delta; when it is spent, the party stops training. Implies dp
# delta = 1e-5
# dp = false         # train only if the reply is differentially private (dp-sgd)
# sigma = 0.3        # and has at least this noise multiplier
# discrete = false   # and adds noise in exact arithmetic: refuses local.mechanism = "float"
# secure = false     # train only if the update is hidden in a secure sum
# active = false     # and only with signed masks: a job's privacy.active alone would be the aggregator's word
# declines = 20      # asks, over all jobs, that it may decline after it has read its samples (each reveals a bit);
#                    # then it answers no such ask any more

# [evaluate]         # limits on metrics of this party's test samples; these are the defaults with a floor
# min_samples = 20   # the fewest test samples for an evaluation
# numbers = 200      # the most numbers of an evaluation: metrics, classes, bins and groups (without a floor: any)
# groups = { sex = [0, 1], age = { edges = [40, 60] } }   # columns that jobs may group test samples by, and into which
#                    # groups; with a floor none, without one any. A party with a group of fewer than min_samples test
#                    # samples tells nothing of the groups of that column

# [budget]           # asks that may read this party's samples, over all jobs; a repeated ask counts once. The kinds are
#                    # train, statistics, evaluate, describe and match
# queries = 10000    # the budget of all kinds together; default: no limit
# costs = { evaluate = 1, match = 10 }   # what an ask of each kind costs, by default 1
# total = { evaluate = 1000 }    # the most asks of a kind; with a floor 1000 evaluations, without one no limit
# per_job = { evaluate = 100 }   # and in each job; with a floor 100 evaluations, without one no limit
# renew = false      # true: other samples (--data) begin a new budget. Answers about two data sets that differ in one
#                    # row may tell of that row

# [ranges]           # the numbers that a job may choose, by field or by part and field; these are some of the defaults
# batch = [1, 1000000000]        # a lower bound of 32 refuses updates of fewer samples per step
# lr = [0.0, 1e6]
# clip = [1e-9, 1e9]             # dp-sgd itself: 1e-6 to 1e6
# sigma = [0.0, 1e6]
# "secure-masked.range" = [1e-6, 1e12]

# [broadcast]        # checks of the models that this party is asked to train
# rounds = true      # refuse to train for an earlier round than before in the job
# replays = false    # refuse a model of an earlier round of the job
# norm = 10.0        # the largest norm of the change since the last model; without it: any
# factor = 10.0      # and at most this many times the median of the changes before; without it: any
# loss = 3.0         # the loss on this party's samples is at most this many times the median before; without it: any
# refusals = 20      # models, over all jobs, that it may refuse for their loss (each reveals a bit); then it stops

# [limits]           # the most work per ask
# epochs = 10000
# steps = 1000000
# seconds = 86400    # an ask that takes longer is stopped
# parameters = 1000000000   # of a model that comes with hansa or its plug-ins
# participants = 10000      # parties that this one shares secrets with in a secure sum, or messages in a route
# people = 10000000         # people that another party may bring to be matched with the people of this one, per job
# jobs = 1000        # jobs whose memory this party keeps; beyond that, it deletes those that trained longest ago
# public = 1073741824       # bytes of public samples that this party stores, of all jobs together
# memory = 8589934592       # bytes; default: all memory of the machine

# [approve]          # who approves a job before its first ask (`hansa approve`); see docs/howto/approve.md
# mode = "always"    # "always": every job is approved; "ask": the owner approves each job; "rules": a job that meets
#                    # every rule below is approved, and any other job waits for the owner
# jobs = ["heart-*"] # rules: jobs, models, algorithms and fellow parties by name
# models = ["logistic"]
# algorithms = ["fedavg"]
# parties = ["clinic", "hospital"]
# min_parties = 3    # the fewest parties of a job
# min_cohort = 3     # the smallest cohort that a job may allow
# rounds = 100       # the most rounds
# epochs = 5         # the most epochs of local training per ask
# steps = 1000       # the most steps
# epsilon = 3.0      # every reply from training samples is differentially private, and costs a job at most this
# delta = 1e-5       # at a delta of at most this
# secure = true      # replies are hidden in a secure sum
# active = true      # with signatures

# [trust]            # what the aggregator must prove before this party works for it; see docs/attestation.md
# attestation = { name = "sev-snp", measurements = ["4af0..."], roots = "amd-milan.pem" }

# [peers]            # the parties that this one sends messages to, receives them from, or forms masked sums with,
# clinic = "5f1e..."  # each with the fingerprint of its certificate, as that party tells you; no other is accepted

# [own]              # replaces the aggregator's values
# lr = 0.01
# batch = 32

# [data]             # what is told of the data, to every job; `hansa join` adds this table. See docs/deploy.md
"""
