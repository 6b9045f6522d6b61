"""Mistakes that users make, each through the command line: one line that says what is wrong, exit code 2, no trace.

The name of a case is the mistake, so that ``pytest tests/test_bad_inputs.py -v`` shows the list.
"""

import io
import json
import re
import shlex
import shutil
import sys

import numpy as np
import pytest
from PIL import Image

from fedjax_pfl import METHODS, load_config, simulate
from fedjax_pfl.cli.commands import main
from fedjax_pfl.data.partition import PARTITIONS
from fedjax_pfl.models import MODELS

CONFIG = """
[data]
source = "digits"
clients = 4
partition = { kind = "iid" }
[model]
name = "mlp"
[method]
name = "fedavg"
[training]
rounds = 2
"""
SWEEP = 'config = "config.toml"\n'
IMAGES, LABELS = np.zeros((40, 4, 4, 1), np.uint8), np.arange(40) % 2
ANY = "..."  # in an expected message: any text
HERE = "HERE"  # in an expected message: the working directory


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def png(height, width):
    file = io.BytesIO()
    Image.fromarray(np.zeros((height, width, 3), np.uint8)).save(file, "png")
    return file.getvalue()


def shard(**users):
    return json.dumps({"users": list(users), "user_data": users})


FILES = {
    "occupied/config.toml/file": "",
    "config.toml": CONFIG,
    "empty.toml": "",
    "text.toml": "lr = 0.1 and 30 rounds",
    "binary.toml": bytes(range(256)),
    "loose_key.toml": "lr = 0.1\n" + CONFIG,
    "no_table.toml": CONFIG.replace("[training]\nrounds = 2", "").replace("[data]", "training = 3\n[data]", 1),
    "misspelt_section.toml": CONFIG.replace("[data]", "[date]"),
    "misspelt_source.toml": CONFIG.replace("source =", "sorce ="),
    "good.npz": npz(image=IMAGES, label=LABELS),
    "no_label.npz": npz(image=IMAGES),
    "int.npz": npz(image=IMAGES.astype(int), label=LABELS),
    "lengths.npz": npz(image=IMAGES, label=LABELS[:30]),
    "channels_first.npz": npz(image=np.zeros((40, 3, 32, 32), np.uint8), label=LABELS),
    "empty.npz": npz(image=IMAGES[:0], label=LABELS[:0]),
    "plural.npz": npz(image=IMAGES, label=LABELS, users=LABELS),
    "negative.npz": npz(image=IMAGES, label=LABELS - 1),
    "float_label.npz": npz(image=IMAGES, label=LABELS / 2),
    "one_hot.npz": npz(image=IMAGES, label=np.eye(2, dtype=int)[LABELS]),
    "names.npz": npz(image=IMAGES, label=np.array(["cat", "dog"])[LABELS]),
    "truncated.npz": npz(image=IMAGES, label=LABELS)[:500],
    "damaged.npz": npz(image=IMAGES, label=LABELS).replace(bytes(100), bytes(99) + b"x", 1),
    "no_images/notes.txt": "nothing here",
    "one_class/cat/1.png": png(4, 4),
    "sizes/cat/1.png": png(4, 4),
    "sizes/dog/1.png": png(5, 4),
    "corrupt/cat/1.png": png(4, 4),
    "corrupt/dog/1.png": png(4, 4)[:30],
    "leaf/not_json/a.json": "{",
    "leaf/no_user_data/a.json": json.dumps({"users": ["ann"], "num_samples": [1]}),
    "leaf/lengths/a.json": shard(ann={"x": [[0, 0, 0, 0]], "y": [1, 2]}),
    "leaf/ragged/a.json": shard(ann={"x": [[0, 0, 0, 0], [1, 1]], "y": [1, 2]}),
    "leaf/bytes/a.json": shard(ann={"x": [[0, 255, 0, 0]], "y": [1]}),
    "leaf/play/a.json": shard(ROMEO={"x": ["what lig"] * 20, "y": ["h"] * 20}, JULIET={"x": ["O Romeo,"], "y": [" "]}),
    "no_grid.toml": SWEEP,
    "empty_grid.toml": SWEEP + "[grid]",
    "misspelt_grid.toml": SWEEP + "[gird]\ntraining.lr = [0.1]",
    "no_config.toml": 'config = "none.toml"\n[grid]\ntraining.lr = [0.1]',
    "overrides.toml": SWEEP + 'overrides = "training.lr=1"\n[grid]\ntraining.lr = [0.1]',
    "unknown_field.toml": SWEEP + "[grid]\ntraining.rate = [0.1]",
    "undotted_field.toml": SWEEP + "[grid]\nlr = [0.1]",
    "no_list.toml": SWEEP + "[grid]\ntraining.lr = 0.1",
    "twice.toml": SWEEP + "[grid]\ntraining.lr = [0.1, 0.2, 0.1]",
    "bad_value.toml": SWEEP + "[grid]\ntraining.lr = [0.1, -0.2]",
    "listed_method.toml": SWEEP + '[grid]\nmethod.name = [["fedavg", "local"]]',
    "chunk_grid.toml": SWEEP + "[grid]\nrun.chunk = [1, 2]",
    "baseline.toml": SWEEP + "[grid]\ntraining.lr = [0.1]\n[baseline]\ntraining.lr = 0.2",
    "no_baseline.toml": SWEEP + 'baseline = "training.lr=0.1"\n[grid]\ntraining.lr = [0.1]',
    "sweep.toml": SWEEP + "[grid]\ntraining.lr = [0.1]",
    "tune.toml": SWEEP + "[space]\ntraining.lr = [0.1]",
}

OWN = "; or your own, once registered in this process or offered by an installed package"
METHOD_NAMES, MODEL_NAMES, KINDS = ", ".join(METHODS), ", ".join(MODELS), ", ".join(PARTITIONS)
SECTIONS = (
    "protocol, data, model, method, training, finetune, calibration, participation, aggregation, attack, compression, "
    "privacy, run"
)
NPZ, FOLDER, LEAF, TFDS = (f"run config.toml data.source={kind}:" for kind in ("npz", "folder", "leaf", "tfds"))
PATHOLOGICAL = "run config.toml data.partition.kind=pathological data.partition."

# The mistake: (the command line, what stands after "error: ").
CASES = {
    # The command line itself
    "no such command": ("rum config.toml", "No such command 'rum'... (see fedjax-pfl --help)"),
    "no such option": ("run config.toml --seed 3", "No such option: --seed (see fedjax-pfl run --help)"),
    "option without its value": (
        "run config.toml --out",
        "Option '--out' requires an argument (see fedjax-pfl... --help)",
    ),
    "no config given to compare": ("compare", "Missing argument 'CONFIG.toml' (see fedjax-pfl compare --help)"),
    "no config given to run": (
        "run",
        "CONFIG.toml = '(missing)' is not usable: a config file, or --resume with a run directory",
    ),
    "two methods to describe": (
        "describe local fedavg",
        "Got unexpected extra argument...(fedavg) (see fedjax-pfl describe --help)",
    ),
    "describe what there is not": (
        "describe fedsgd",
        "NAME = 'fedsgd' is not usable: a method, model, partition, data source, protocol, section (training) or field "
        "(training.lr); fedjax-pfl methods, models, partitions and datasets list them",
    ),
    "override without a section": (
        "run config.toml lr=0.1",
        "override = 'lr=0.1' is not usable: expected section.key=value, e.g. training.lr=0.01",
    ),
    "override without a value": (
        "run config.toml training.lr",
        "override = 'training.lr' is not usable: expected section.key=value, e.g. training.lr=0.01",
    ),
    "override inside a value": (
        "run config.toml data.source.path=a.npz",
        "override = 'data.source.path=a.npz' is not usable: source is a value, not a table",
    ),
    "run into two directories": (
        "run config.toml run.out=a --out b",
        "override = 'run.out=a' is not usable: leave it out: the run goes to b",
    ),
    "run into a directory without a name": (
        "run config.toml --out ''",
        "run.out = '' is not usable: string should have at least 1 character",
    ),
    "compare into a folder without a name": (
        "compare config.toml --out ''",
        "--out = '' is not usable: a folder, or leave it out",
    ),
    "compare an unknown method": (
        "compare config.toml --methods fedavg,fedsgd",
        f"methods = 'fedsgd' is not usable: allowed: {METHOD_NAMES}{OWN}",
    ),
    "compare a method with itself": (
        "compare config.toml --methods fedavg,fedavg",
        "methods = ['fedavg', 'fedavg'] is not usable: one or more, each of them once",
    ),
    "compare with seeds that are no numbers": (
        "compare config.toml --seeds a,b",
        "--seeds = 'a,b' is not usable: whole numbers, separated by commas",
    ),
    "compare with a wrong value for one of two methods that have the key": (
        "compare config.toml --methods fedprox,moon --set moon.mu=abc",
        "methods.moon.mu = 'abc' is not usable: input should be a valid number",
    ),
    "compare with a hyperparameter that the config's method lacks": (
        "compare config.toml --methods fedprox method.mu=1",
        "method.mu = 1 is not usable: no such key of fedavg; allowed: none; of a method that is compared: --set "
        "METHOD.KEY=VALUE",
    ),
    "compare with a seed twice": (
        "compare config.toml --seeds 0,0",
        "seeds = [0, 0] is not usable: one or more, each of them once",
    ),
    "compare with a baseline that does not take part": (
        "compare config.toml --methods fedavg,fedprox --baseline local",
        "baseline = 'local' is not usable: one of the methods compared: fedavg, fedprox",
    ),
    # The config file
    "config file missing": (
        "run none.toml",
        "config file = 'none.toml' is not usable: cannot be read (No such file or directory)",
    ),
    "config file is a directory": (
        "run no_images",
        "config file = 'no_images' is not usable: cannot be read (Is a directory)",
    ),
    "config file is no TOML": ("run text.toml", "config file = 'text.toml' is not usable: not valid TOML: ..."),
    "config file is binary": ("run binary.toml", "config file = 'binary.toml' is not usable: not valid TOML: ..."),
    "config file is empty": ("run empty.toml", "data = '(missing)' is not usable: it has no default and must be given"),
    "sweep file given to run": (
        "run sweep.toml",
        "config file = 'sweep.toml' is not usable: with [grid] it is a sweep file: fedjax-pfl sweep sweep.toml",
    ),
    "tune file given to compare": (
        "compare tune.toml",
        "config file = 'tune.toml' is not usable: with [space] it is a tune file: fedjax-pfl tune tune.toml",
    ),
    "key outside of a section": ("run loose_key.toml", f"lr = 0.1 is not usable: no such key; allowed: {SECTIONS}"),
    "value in the place of a section": ("run no_table.toml", "training = 3 is not usable: expected a table [training]"),
    "misspelt section": (
        "run misspelt_section.toml",
        f"date = {{'source': 'digits', ...}} is not usable: no such key; did you mean data? allowed: {SECTIONS}",
    ),
    "misspelt key that has no default": (
        "run misspelt_source.toml",
        "data.sorce = 'digits' is not usable: no such key; did you mean source? allowed: source, clients, ...",
    ),
    "misspelt key": (
        "run config.toml training.learning_rate=0.1",
        "training.learning_rate = 0.1 is not usable: no such key; did you mean lr? "
        "allowed: rounds, epochs, batch_size, lr, ...",
    ),
    "misspelt option of the model": (
        "run config.toml model.hiden=50",
        "model.hiden = 50 is not usable: no such key of mlp; did you mean hidden? allowed: hidden, init",
    ),
    # Names
    "unknown method": (
        "run config.toml method.name=fedsgd",
        f"method.name = 'fedsgd' is not usable: allowed: {METHOD_NAMES}{OWN}",
    ),
    "several methods in a run": (
        'run config.toml \'method.name=["fedavg", "local"]\'',
        f"method.name = ['fedavg', 'local'] is not usable: allowed: {METHOD_NAMES}",
    ),
    "hyperparameter of another method": (
        "run config.toml method.mu=0.1",
        "method.mu = 0.1 is not usable: no such key of fedavg; allowed: none",
    ),
    "unknown model": (
        "run config.toml model.name=vgg",
        f"model.name = 'vgg' is not usable: allowed: {MODEL_NAMES}{OWN}",
    ),
    "unknown partition": (
        "run config.toml data.partition.kind=dirichlett",
        f"data.partition.kind = 'dirichlett' is not usable: did you mean dirichlet? allowed: {KINDS}",
    ),
    "parameter of another partition": (
        "run config.toml data.partition.alpha=0.1",
        "data.partition.alpha = 0.1 is not usable: no such key of iid; allowed: none",
    ),
    "a field by the name that other libraries have for it": (
        "run config.toml data.partition.kind=dirichlet data.partition.alpha=0.1",
        "data.partition.alpha = 0.1 is not usable: no such key of dirichlet; did you mean beta? allowed: beta, style, "
        "min_samples",
    ),
    "unknown placement": (
        "run config.toml run.placement=gpu",
        "run.placement = 'gpu' is not usable: input should be 'auto', 'map', 'vmap' or 'shard'",
    ),
    "unknown source": (
        "run config.toml data.source=cifar10",
        "data.source = 'cifar10' is not usable: known sources are digits: ...; npz: npz:PATH, ...",
    ),
    # Values
    "text in the place of a number": (
        "run config.toml training.lr=fast",
        "training.lr = 'fast' is not usable: input should be a valid number",
    ),
    "fraction of a client": (
        "run config.toml data.clients=2.5",
        "data.clients = 2.5 is not usable: input should be a valid integer",
    ),
    "no clients": (
        "run config.toml data.clients=0",
        "data.clients = 0 is not usable: input should be greater than or equal to 1",
    ),
    "negative learning rate": (
        "run config.toml training.lr=-0.1",
        "training.lr = -0.1 is not usable: input should be greater than 0",
    ),
    "learning rate NaN": (
        "run config.toml training.lr=nan",
        "training.lr = nan is not usable: input should be a finite number",
    ),
    "learning rate infinite": (
        "run config.toml training.lr=inf",
        "training.lr = inf is not usable: input should be a finite number",
    ),
    "hyperparameter out of range": (
        "run config.toml method.name=fedprox method.mu=-1",
        "method.mu = -1 is not usable: input should be greater than or equal to 0",
    ),
    "more rounds than can be counted": (
        "run config.toml training.rounds=2147483648",
        "training.rounds = 2147483648 is not usable: input should be less than 2147483648",
    ),
    "hyperparameter beyond what can be counted": (
        "run config.toml method.name=fedrep method.head_epochs=2147483648",
        "method.head_epochs = 2147483648 is not usable: input should be less than 2147483648",
    ),
    "a list with a number beyond what can be counted": (
        "run config.toml method.name=pfedcspc model.name=mlp_proj 'method.server_lr_drops=[6, 2147483648]'",
        "method.server_lr_drops = (6, 2147483648) is not usable: input should be less than 2147483648",
    ),
    "learning rate beyond float32": (
        "run config.toml training.lr=1e39",
        "training.lr = 1e+39 is not usable: input should be 0, or a float32, whose size is 1.18e-38 to 3.4e+38",
    ),
    "hyperparameter that float32 would make 0": (
        "run config.toml method.name=fedprox method.mu=1e-46",
        "method.mu = 1e-46 is not usable: input should be 0, or a float32, whose size is 1.18e-38 to 3.4e+38",
    ),
    "below a value of a protocol": (
        "run config.toml protocol=fedpac training.lr.a.b=1",
        "training.lr = {'a': {'b': 1}} is not usable: input should be a valid number",
    ),
    "more samples for each client than there are": (
        "partition config.toml data.partition.kind=dirichlet data.partition.min_samples=5000",
        "data.clients = 4 is not usable: 5000 samples per client are needed and there are 1797: ask for fewer of "
        "them, or bring more samples",
    ),
    "test share in percent": (
        "run config.toml data.test_share=25",
        "data.test_share = 25 is not usable: input should be less than 1: it is a share",
    ),
    "nobody takes part": (
        "run config.toml participation.ratio=0",
        "participation.ratio = 0 is not usable: a share in (0, 1], or a range [low, high] of shares",
    ),
    "range of participation the wrong way round": (
        "run config.toml participation.ratio=[0.9,0.1]",
        "participation.ratio = [0.9, 0.1] is not usable: a share in (0, 1], or a range [low, high] of shares",
    ),
    "range of participation with one end": (
        "run config.toml participation.ratio=[0.1]",
        "participation.ratio = [0.1] is not usable: a share in (0, 1], or a range [low, high] of shares",
    ),
    "chunk of no clients": (
        "run config.toml run.chunk=0",
        "run.chunk = 0 is not usable: input should be greater than or equal to 1",
    ),
    "validation without a share": (
        "run config.toml data.evaluate_on=validation",
        "data.evaluate_on = 'validation' is not usable: \"test\", or give data.validation_share a value above 0",
    ),
    # What does not fit the data
    "official split of a source without a test part": (
        "run config.toml data.split=official",
        "data.split = 'official' is not usable: digits has no test part of its own; "
        'use "merge", or give data.test_part_share',
    ),
    "natural clients of a source without users": (
        "run config.toml data.partition.kind=natural",
        "data.partition.kind = 'natural' is not usable: digits has no users; use one of iid, pathological, ...",
    ),
    "more classes per client than there are": (
        f"{PATHOLOGICAL}classes_per_client=11",
        "data.partition.classes_per_client = 11 is not usable: "
        "the data have samples of 10 classes, so 1 to 10 are possible",
    ),
    "a stratified split of official parts": (
        "run config.toml data.split=official data.stratified=true",
        'data.stratified = True is not usable: false with data.split = "official", which gives each client test '
        "samples in its own proportions",
    ),
    "more samples per client than there are": (
        "run config.toml data.samples_per_client=1000",
        "data.samples_per_client = 1000 is not usable: up to 336: 1797 samples, 4 clients, test_share = 0.25",
    ),
    "equal sizes in a style that has none": (
        f"{PATHOLOGICAL}style=pfllib data.samples_per_client=10",
        "data.partition.style = 'pfllib' is not usable: "
        "another style with data.samples_per_client: 'pfllib' shares out all samples",
    ),
    "weak_pathological without a size": (
        "run config.toml data.partition.kind=weak_pathological",
        "data.samples_per_client = None is not usable: a number; weak_pathological clients are equal in size",
    ),
    "too many clients for a Dirichlet partition": (
        "run config.toml data.partition.kind=dirichlet data.clients=1000",
        "data.clients = 1000 is not usable: 1 to 898, because 1797 samples must give each client 2",
    ),
    "partition of too many clients": (
        "partition config.toml data.clients=1000",
        "data.clients = 1000 is not usable: 1 to 898, because 1797 samples must give each client 2",
    ),
    "a method that selects on validation samples without any": (
        "run config.toml method.name=fedsoup",
        "data.validation_share = 0.0 is not usable: above 0, such as 0.2: fedsoup selects on validation samples",
    ),
    "a method that selects on the samples that it is scored on": (
        "run config.toml method.name=fedsoup data.validation_share=0.2 data.evaluate_on=validation",
        "data.evaluate_on = 'validation' is not usable: \"test\": fedsoup selects on the validation samples",
    ),
    "fine-tuning of what is more than an extractor with a head": (
        "run config.toml method.name=fedfcd finetune.epochs=2",
        "finetune.epochs = 2 is not usable: 0 for fedfcd: it answers by more than an extractor with a head, which is "
        "what fine-tuning trains (its predict is not model.apply itself)",
    ),
    "fine-tuning of a method that has a kind of its own": (
        "run config.toml method.name=fedetf finetune.epochs=2",
        "finetune.epochs = 2 is not usable: 0 for fedetf: it answers by more than an extractor with a head, which is "
        "what fine-tuning trains (its predict is not model.apply itself)",
    ),
    "fine-tuning on top of fine-tuning": (
        "run config.toml method.name=fedavg_ft method.finetune_epochs=3 finetune.epochs=2",
        "finetune.epochs = 2 is not usable: 0 for fedavg_ft, which fine-tunes by method.finetune_epochs = 3 already: "
        "set one of them to 0",
    ),
    "a rate of no fine-tuning": (
        "run config.toml finetune.lr=0.1",
        "finetune.lr = 0.1 is not usable: leave it out with finetune.epochs = 0",
    ),
    "calibration of a method without a global model": (
        "run config.toml method.name=fedper calibration.samples_per_class=100",
        "calibration.samples_per_class = 100 is not usable: 0 for fedper: only a global model that is scored as it is "
        "broadcast can be calibrated",
    ),
    "calibration on top of calibration": (
        "run config.toml method.name=ccvr calibration.samples_per_class=8",
        "calibration.samples_per_class = 8 is not usable: 0 for ccvr: its global model is calibrated already, by "
        "options of its own",
    ),
    "calibration in the clear beside privacy": (
        "run config.toml calibration.samples_per_class=100 privacy.clip=1.0 privacy.noise=1.0",
        "calibration.samples_per_class = 100 is not usable: 0 with privacy.clip: clients would send statistics of "
        "their features, which nothing hides",
    ),
    "batches that nobody fills": (
        "run config.toml training.drop_last=true training.batch_size=5000",
        "training.batch_size = 5000 is not usable: at most ... with training.drop_last: nobody has a whole batch to "
        "train on",
    ),
    "batches of two batches that nobody fills": (
        "run config.toml training.drop_last=true training.batch_size=400 method.name=perfedavg data.clients=3",
        "training.batch_size = 400 is not usable: at most ... with training.drop_last: nobody has a whole batch to "
        "train on",
    ),
    "a rule that would choose who cannot train": (
        "run config.toml training.drop_last=true training.batch_size=400 aggregation.rule=krum data.clients=3 "
        "data.partition.kind=dirichlet data.partition.beta=0.5",
        'training.batch_size = 400 is not usable: at most ... with training.drop_last and aggregation.rule = "krum": '
        "a client has no more",
    ),
    "data that no run of a comparison has": (
        "compare config.toml --methods local,fedavg data.source=npz:none.npz --out nowhere",
        "data.source = 'npz:none.npz' is not usable: ...",
    ),
    "a metric that no run of a comparison has": (
        'compare config.toml --methods local,fedavg run.metrics=["nope"]',
        "run.metrics = ...nope... is not usable: ...",
    ),
    "data from Python on the command line": (
        "run config.toml data.source=arrays",
        "data.source = 'arrays' is not usable: with data from Python beside it: simulate(config, data), "
        "compare(config, methods, data=data)",
    ),
    "a rate of no calibration": (
        "run config.toml calibration.lr=0.1",
        "calibration.lr = 0.1 is not usable: leave it out with calibration.samples_per_class = 0",
    ),
    "FedDecorr's term twice": (
        "run config.toml method.name=feddecorr training.decorrelate=0.1",
        "training.decorrelate = 0.1 is not usable: 0: feddecorr has the term, as beta",
    ),
    "three channel means for gray images": (
        "run config.toml data.mean=[0.5,0.5,0.5]",
        "data.mean = [0.5, 0.5, 0.5] is not usable: one number, or one for each of the 1 channels",
    ),
    "three channel deviations for gray images in a folder for PFLlib": (
        "partition config.toml --pfllib new data.std=[0.5,0.5,0.5]",
        "data.std = [0.5, 0.5, 0.5] is not usable: one number, or one for each of the 1 channels",
    ),
    "clients that do not fit into memory": (
        "run config.toml data.clients=200 model.hidden=100000000",
        "data.clients = 200 is not usable: the run needs about ... GB; the machine has ... GB",
    ),
    # What does not fit together
    "convolutions on images of 4x4": (
        f"{NPZ}good.npz model.name=cnn2",
        "model.name = 'cnn2' is not usable: it does not fit 4x4x1 images: "
        "a 5x5 convolution and pooling do not fit a 4x4 map",
    ),
    "text model on images": (
        "run config.toml model.name=char_lstm",
        "model.name = 'char_lstm' is not usable: it reads text of 80 symbols, and digits is images",
    ),
    "image model on text": (
        f"{LEAF}leaf/play",
        "model.name = 'mlp' is not usable: it reads images, and play is text of 80 symbols",
    ),
    "the mean of pixels for text": (
        f"{LEAF}leaf/play model.name=char_lstm data.mean=0.3",
        "data.mean = 0.3 is not usable: 0.5, or left out: play is text, which has no pixels",
    ),
    "augmentation of text": (
        f"{LEAF}leaf/play model.name=char_lstm training.augment=crop_flip",
        "training.augment = 'crop_flip' is not usable: \"none\": play is text, and 'crop_flip' augments images",
    ),
    "pFedCSPC without a projection head": (
        "run config.toml method.name=pfedcspc",
        "method.name = 'pfedcspc' is not usable: it does not work like this: "
        "it needs a model with a projection head, such as cnn_proj or resnet18_proj",
    ),
    "FedCPD without feature maps": (
        "run config.toml method.name=fedcpd",
        "method.name = 'fedcpd' is not usable: it does not work like this: "
        "its distillation (gamma > 0) needs a model with feature maps",
    ),
    # npz files
    "npz without a path": (NPZ, "data.source = 'npz:' is not usable: a path is needed after the colon: npz:PATH"),
    "npz missing and FEDJAX_PFL_DATA unset": (
        f"{NPZ}cifar10.npz",
        "data.source = 'npz:cifar10.npz' is not usable: there is no such file; looked for HERE/cifar10.npz "
        "(the environment variable FEDJAX_PFL_DATA may name a folder of data files)",
    ),
    "npz without labels": (
        f"{NPZ}no_label.npz",
        "data.source = 'npz:no_label.npz' is not usable: "
        "HERE/no_label.npz must hold arrays image (or x) and label (or y); present: image",
    ),
    "npz of images as integers": (
        f"{NPZ}int.npz",
        "data.source = 'npz:int.npz' is not usable: the samples must be uint8 (pixels) or floats, got int64: "
        "numpy.asarray(x, numpy.float32), or numpy.uint8 of pixels from 0 to 255",
    ),
    "npz with channels first": (
        f"{NPZ}channels_first.npz",
        "data.source = 'npz:channels_first.npz' is not usable: the samples must be [n, h, w, c], got (40, 3, 32, 32): "
        "the channels seem to come first; numpy.moveaxis(x, 1, -1) puts them last",
    ),
    "npz with fewer labels than images": (
        f"{NPZ}lengths.npz",
        "data.source = 'npz:lengths.npz' is not usable: one label per sample is needed, got 40 samples and 30 labels",
    ),
    "npz without samples": (
        f"{NPZ}empty.npz",
        "data.source = 'npz:empty.npz' is not usable: the samples hold nothing, their shape is (0, 4, 4, 1)",
    ),
    "npz with users under another name": (
        f"{NPZ}plural.npz data.partition.kind=natural",
        "data.partition.kind = 'natural' is not usable: plural has no users (left out: users); use one of iid, ...",
    ),
    "npz of negative labels": (
        f"{NPZ}negative.npz",
        "data.source = 'npz:negative.npz' is not usable: the labels must be 0 or more, the smallest is -1",
    ),
    "npz of labels that are no integers": (
        f"{NPZ}float_label.npz",
        "data.source = 'npz:float_label.npz' is not usable: the labels must be integers, the numbers of "
        "classes, and 0.5 is none",
    ),
    "npz of labels that are names": (
        f"{NPZ}names.npz",
        "data.source = 'npz:names.npz' is not usable: the labels must be integers, got <U3: "
        "numpy.unique(y, return_inverse=True)[1] numbers the classes",
    ),
    "npz of one-hot labels": (
        f"{NPZ}one_hot.npz",
        "data.source = 'npz:one_hot.npz' is not usable: the labels must be class numbers [n], got (40, 2): y.argmax(1) "
        "gives these",
    ),
    "npz truncated": (
        f"{NPZ}truncated.npz",
        "data.source = 'npz:truncated.npz' is not usable: "
        "HERE/truncated.npz is no npz file; write one with numpy.savez",
    ),
    "npz damaged": (
        f"{NPZ}damaged.npz",
        "data.source = 'npz:damaged.npz' is not usable: HERE/damaged.npz cannot be read as plain arrays (...)",
    ),
    "npz that is a text file": (
        f"{NPZ}text.toml",
        "data.source = 'npz:text.toml' is not usable: HERE/text.toml is no npz file; write one with numpy.savez",
    ),
    "npz in the folder of a user whom nobody knows": (
        f"{NPZ}'~nobody_knows/a.npz'",
        "data.source = 'npz:~nobody_knows/a.npz' is not usable: there is no such file; looked for "
        "HERE/~nobody_knows/a.npz (...)",
    ),
    "npz with too long a name": (
        f"{NPZ}{'a' * 300}",
        f"data.source = 'npz:{'a' * 300}' is not usable: there is no such file; looked for HERE/{'a' * 300} (...)",
    ),
    "rows in the folder of a user whom nobody knows": (
        "run config.toml data.partition.kind=indices data.partition.file='~nobody_knows/a.npz'",
        "data.partition.file = '~nobody_knows/a.npz' is not usable: there is no such file; looked for "
        "HERE/~nobody_knows/a.npz",
    ),
    # Folders, LEAF, tensorflow-datasets
    "folder missing": (
        f"{FOLDER}none",
        "data.source = 'folder:none' is not usable: there is no such folder; looked for HERE/none (...)",
    ),
    "folder without images": (
        f"{FOLDER}no_images",
        "data.source = 'folder:no_images' is not usable: HERE/no_images holds no folders of images; "
        "expected is a folder per class (PATH/<class>/*.png), ...",
    ),
    "folder of one class": (
        f"{FOLDER}one_class",
        "data.source = 'folder:one_class' is not usable: HERE/one_class has images of one class alone, 'cat'; ...",
    ),
    "folder of images of several sizes": (
        f"{FOLDER}sizes",
        "data.source = 'folder:sizes' is not usable: HERE/sizes/dog/1.png has 4x5 pixels, HERE/sizes/cat/1.png has "
        "4x4; images of one size are needed: ?size=64 after the path resizes all to 64x64",
    ),
    "folder with an unknown option": (
        f"{FOLDER}sizes?resize=64",
        "data.source = 'folder:sizes?resize=64' is not usable: "
        "the only option is ?size=N, to resize images to NxN pixels, N up to 1024",
    ),
    "folder with a corrupt image": (
        f"{FOLDER}corrupt",
        "data.source = 'folder:corrupt' is not usable: HERE/corrupt/dog/1.png cannot be decoded as an image (...)",
    ),
    "LEAF folder without shards": (
        f"{LEAF}no_images",
        "data.source = 'leaf:no_images' is not usable: HERE/no_images holds no JSON shard with samples; ...",
    ),
    "LEAF shard that is no JSON": (
        f"{LEAF}leaf/not_json",
        "data.source = 'leaf:leaf/not_json' is not usable: HERE/leaf/not_json/a.json is no readable JSON file (...)",
    ),
    "LEAF shard without user_data": (
        f"{LEAF}leaf/no_user_data",
        "data.source = 'leaf:leaf/no_user_data' is not usable: "
        'HERE/leaf/no_user_data/a.json is no LEAF shard: it has no table "user_data"',
    ),
    "LEAF user with more labels than samples": (
        f"{LEAF}leaf/lengths",
        "data.source = 'leaf:leaf/lengths' is not usable: "
        "user 'ann' in HERE/leaf/lengths/a.json: 1 samples x and 2 labels y",
    ),
    "LEAF images of several lengths": (
        f"{LEAF}leaf/ragged",
        "data.source = 'leaf:leaf/ragged' is not usable: "
        "user 'ann' in HERE/leaf/ragged/a.json: x is neither texts nor lists of numbers, all of one length",
    ),
    "LEAF images that are not scaled": (
        f"{LEAF}leaf/bytes",
        "data.source = 'leaf:leaf/bytes' is not usable: "
        "user 'ann' in HERE/leaf/bytes/a.json: pixels from 0.0 to 255.0; they must be within 0 and 1",
    ),
    "unknown name for tensorflow-datasets": (
        f"{TFDS}cifar11",
        "data.source = 'tfds:cifar11' is not usable: tensorflow-datasets refuses it (Dataset cifar11 not found.)",
    ),
    "tensorflow-datasets not prepared": (
        f"{TFDS}cifar10",
        "data.source = 'tfds:cifar10' is not usable: it is not prepared in HERE/tfds; with a network and TensorFlow "
        "(...), this prepares it: python -c ...",
    ),
    # Run directories
    "run directory that holds another run": (
        "run config.toml --out complete",
        "run.out = 'complete' is not usable: the directory is not empty; name another one, or replace it: "
        "overwrite=True, --overwrite",
    ),
    "run directory in which a run has begun": (
        "run config.toml --out interrupted",
        "run.out = 'interrupted' is not usable: the directory is not empty; go on with the run that has begun there: "
        "resume=, --resume; name another one, or replace it: overwrite=True, --overwrite",
    ),
    "run directory without a name": (
        "run config.toml run.out=",
        "run.out = '' is not usable: string should have at least 1 character",
    ),
    "run directory that is a file": (
        "run config.toml --out good.npz",
        "run.out = 'good.npz' is not usable: it is a file, or inside one; name a directory",
    ),
    "run directory inside a file": (
        "run config.toml --out good.npz/run",
        "run.out = 'good.npz/run' is not usable: it is a file, or inside one; name a directory",
    ),
    "run directory with too long a name": (
        f"run config.toml --out {'a' * 300}",
        f"run.out = '{'a' * 300}' is not usable: name a directory that can be written (File name too long)",
    ),
    "run directory that holds a folder where a file goes": (
        "run config.toml --out occupied --overwrite",
        "run.out = 'occupied' is not usable: name a directory that can be written (Is a directory)",
    ),
    "comparison into a file": (
        "compare config.toml --out good.npz",
        "--out = 'good.npz' is not usable: it is a file, or inside one; name a directory",
    ),
    "comparison into one of another config": (
        "compare config.toml --methods fedavg --out compared training.epochs=3",
        "config = 'training.epochs=3' is not usable: "
        "what the run in compared/fedavg-seed0 was started with: training.epochs=1",
    ),
    "compilation cache that is a file": (
        "run config.toml run.compilation_cache=good.npz",
        "run.compilation_cache = 'good.npz' is not usable: a folder, or \"off\"; it is a file",
    ),
    # Resuming
    "resume a directory that does not exist": (
        "run --resume none",
        "--resume = 'none' is not usable: a run directory: it holds config.toml and checkpoints",
    ),
    "resume a directory that is no run": (
        "run --resume sizes",
        "--resume = 'sizes' is not usable: a run directory: it holds config.toml and checkpoints",
    ),
    "resume without a checkpoint": (
        "run --resume no_checkpoint",
        "resume = 'HERE/no_checkpoint' is not usable: a run directory that holds a checkpoint: there is none in it "
        "(run.checkpoint_every)",
    ),
    "resume into another directory": (
        "run --resume interrupted --out other",
        "--out = 'other' is not usable: leave it out: the run in interrupted goes on there",
    ),
    "resume with another config": (
        "run --resume interrupted training.lr=0.5 run.seed=1",
        "config = 'run.seed=1, training.lr=0.5' is not usable: "
        "what the run in interrupted was started with: run.seed=0, training.lr=0.005",
    ),
    "resume with fewer rounds than are done": (
        "run --resume interrupted training.rounds=1",
        "training.rounds = 1 is not usable: 2 or more: so many are done",
    ),
    "resume a complete run": (
        "run --resume complete",
        "resume = 'complete' is not usable: "
        "the run is complete after 2 rounds; to go on, give a larger training.rounds",
    ),
    "resume from a damaged checkpoint": (
        "run --resume damaged",
        "resume = 'HERE/damaged/checkpoints/2' is not usable: a readable checkpoint (...); "
        "without this folder, the run resumes from the one before",
    ),
    "a run directory that checkpoints cannot be read from": (
        "run config.toml --out runs[1]/a",
        "run.out = 'HERE/runs[1]/a' is not usable: a path without [...] and backslashes, in which checkpoints cannot "
        "be kept; a link to it may be",
    ),
    # Sweeps
    "sweep file missing": (
        "sweep none.toml",
        "sweep file = 'none.toml' is not usable: cannot be read (No such file or directory)",
    ),
    "sweep file is no TOML": ("sweep text.toml", "sweep file = 'text.toml' is not usable: not valid TOML: ..."),
    "config file given to sweep": (
        "sweep config.toml",
        "sweep file = 'config.toml' is not usable: config (a path), [grid]; optional: overrides, [baseline]; "
        "it has data, method, model, training",
    ),
    "sweep without a grid": (
        "sweep no_grid.toml",
        "grid = {} is not usable: one field or more, each with a list of values",
    ),
    "sweep with an empty grid": (
        "sweep empty_grid.toml",
        "grid = {} is not usable: one field or more, each with a list of values",
    ),
    "sweep with a misspelt grid": (
        "sweep misspelt_grid.toml",
        "sweep file = 'misspelt_grid.toml' is not usable: config (a path), [grid]; optional: overrides, [baseline]; "
        "it has gird",
    ),
    "sweep of a config that is missing": (
        "sweep no_config.toml",
        "config file = 'none.toml' is not usable: cannot be read (No such file or directory)",
    ),
    "sweep whose overrides are no list": (
        "sweep overrides.toml",
        "overrides = 'training.lr=1' is not usable: a list of strings, e.g. [\"training.lr=0.01\"]",
    ),
    "sweep over an unknown field": (
        "sweep unknown_field.toml",
        "training.rate = 0.1 is not usable: no such key; allowed: rounds, epochs, batch_size, lr, ...",
    ),
    "sweep over a field without a section": (
        "sweep undotted_field.toml",
        "grid.lr = 0.1 is not usable: a dotted field such as training.lr",
    ),
    "sweep over one value": (
        "sweep no_list.toml",
        "grid.training.lr = 0.1 is not usable: a list of one value or more, each of them once",
    ),
    "sweep over a value twice": (
        "sweep twice.toml",
        "grid.training.lr = [0.1, 0.2, 0.1] is not usable: a list of one value or more, each of them once",
    ),
    "sweep over a value out of range": (
        "sweep bad_value.toml",
        "training.lr = -0.2 is not usable: input should be greater than 0",
    ),
    "sweep over a list of methods in a list": (
        "sweep listed_method.toml",
        f"method.name = ['fedavg', 'local'] is not usable: allowed: {METHOD_NAMES}",
    ),
    "sweep over what changes no numbers": (
        "sweep chunk_grid.toml",
        "grid.run.chunk = [1, 2] is not usable: another field: of [run], a grid may vary only run.seed",
    ),
    "sweep whose baseline is not in the grid": (
        "sweep baseline.toml",
        "baseline = 'training.lr=0.2' is not usable: one of the combinations, without the seed, "
        "such as {'training.lr': 0.1}",
    ),
    "sweep whose baseline is no table": (
        "sweep no_baseline.toml",
        "sweep file = 'no_baseline.toml' is not usable: config (a path), [grid]; optional: overrides, [baseline]; "
        "it has config, baseline, grid",
    ),
    "sweep into a file": (
        "sweep sweep.toml --out good.npz/runs",
        "--out = 'good.npz/runs' is not usable: it is a file, or inside one; name a directory",
    ),
    "sweep into one of another config": (
        "sweep sweep.toml --out swept",
        "config = 'training.lr=0.1' is not usable: "
        "what the run in swept/training.lr=0.1 was started with: training.lr=0.005",
    ),
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The working directory of all cases, which none may change: files with mistakes, and what a run has left."""
    here = tmp_path_factory.mktemp("work")
    for name, content in FILES.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    complete = here / "complete"
    simulate(load_config(here / "config.toml", ["run.checkpoint_every=1", f"run.out={complete}"]))
    for name in ("interrupted", "no_checkpoint", "damaged"):
        shutil.copytree(complete, here / name)
        (here / name / "summary.json").unlink()
    shutil.rmtree(here / "no_checkpoint" / "checkpoints")
    for path in (here / "damaged" / "checkpoints" / "2" / "run" / "d").iterdir():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    shutil.copytree(complete, here / "compared" / "fedavg-seed0")
    shutil.copytree(complete, here / "swept" / "training.lr=0.1")
    return here


@pytest.fixture(autouse=True)
def leaves_no_trace(here, monkeypatch):
    """Neither compiles anything, nor adds, changes or removes a file."""
    monkeypatch.chdir(here)
    monkeypatch.delenv("FEDJAX_PFL_DATA", raising=False)
    monkeypatch.setenv("TFDS_DATA_DIR", str(here / "tfds"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    monkeypatch.setattr("fedjax_pfl.experiment.programs._compile", lambda *_: pytest.fail("compiled"))
    before = contents(here)
    yield
    assert contents(here) == before


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(("line", "message"), CASES.values(), ids=CASES)
def test_a_mistake_is_one_line_and_exit_code_2(line, message, here, monkeypatch, capfd, caplog):
    monkeypatch.setattr(sys, "argv", ["fedjax-pfl", *shlex.split(line)])
    with pytest.raises(SystemExit) as left:
        main()
    shown = capfd.readouterr()
    assert (left.value.code, shown.out, caplog.messages) == (2, "", [])  # pytest keeps what is logged from stderr
    parts = map(re.escape, f"error: {message}\n".replace(HERE, str(here)).split(ANY))
    assert re.fullmatch(".*".join(parts), shown.err), shown.err
