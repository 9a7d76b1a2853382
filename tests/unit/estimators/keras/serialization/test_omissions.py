"""Properties that a ``.keras`` file omits reach the ranks and the trained model."""

from __future__ import annotations

import inspect
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

from sparkhvd.errors import ParamError
from sparkhvd.estimators.keras.inputs import Ports, plan_outputs
from sparkhvd.estimators.keras.plugin import PLUGIN
from sparkhvd.estimators.keras.serialization import artifact
from sparkhvd.estimators.keras.serialization.omissions import Omissions
from sparkhvd.estimators.keras.serialization.package import from_configs, model_from_bytes, model_to_bytes, to_configs
from sparkhvd.estimators.keras.settings import KerasSettings
from sparkhvd.estimators.runs.canonical import canonical_form
from sparkhvd.world import World
from tests.unit.estimators.arrays import spec
from tests.unit.estimators.keras.networks import DATA, network, parameters, rows


class Scaled(keras.layers.Layer):
    def __init__(self, factor=1.0, **more):
        super().__init__(**more)
        self.factor = factor

    def call(self, values):
        return values * self.factor

    def get_config(self):
        return super().get_config()


class Encoder(keras.Model):
    def __init__(self, **more):
        super().__init__(**more)
        self.inner = keras.layers.Dense(4, activation="tanh")
        self.normal = keras.layers.BatchNormalization()
        self.outer = keras.layers.Dense(3)
        self.slope = 1.0

    def call(self, values, training=None):
        return self.outer(self.normal(self.inner(values), training=training)) * self.slope


def encoder():
    keras.utils.set_random_seed(2)
    model = Encoder()
    model(np.zeros((2, 6), np.float32))
    return model


def trainer_of(model, optimizer=None):
    params = parameters(model=model, optimizer=optimizer or keras.optimizers.SGD(0.1))
    return PLUGIN.trainer(PLUGIN.pack(params), spec(DATA, epochs=2), World(0, 1, 0, 1, 0, 1))


def trained(model):
    """Return the indices of the trainable weights."""
    return [index for index, weight in enumerate(model.weights) if any(weight is v for v in model.trainable_variables)]


def loaded(trainer, folder):
    artifact.save(folder, trainer._model, trainer._package.objects, Ports((), "single"), Ports((), "single"))
    return artifact.load_model(folder, compiled=True)


def test_layers_of_a_subclassed_model_and_single_variables_stay_frozen(tmp_path):
    model = encoder()
    model.inner.trainable = model.normal.trainable = False
    model.outer.bias.trainable = False
    trainer = trainer_of(model, keras.optimizers.Adam(0.1))
    assert trained(trainer._model) == trained(model) == [6]
    optimizer = trainer._model.optimizer
    optimizer.build(trainer._model.trainable_variables)
    optimizer.variables[2].assign(np.full((4, 3), 0.5))
    again = loaded(trainer, tmp_path)
    assert trained(again) == [6]
    assert not again.normal.trainable
    for one, other in zip(again.optimizer.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_unfrozen_layer_within_a_frozen_model_is_trained():
    keras.utils.set_random_seed(2)
    layers = [keras.Input((6,)), keras.layers.Dense(5, name="first"), keras.layers.Dense(4, name="second")]
    base = keras.Sequential(layers, name="base")
    inputs = keras.Input((6,))
    model = keras.Model(inputs, keras.layers.Dense(3, name="last")(base(inputs)))
    base.trainable, base.layers[1].trainable = False, True
    built = trainer_of(model)._model
    assert trained(built) == trained(model) == [2, 3, 4, 5]


def test_weights_without_decay_stay_without_it(tmp_path):
    def adamw(**excluded):
        optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(**excluded)
        return optimizer

    model = network()
    for excluded in ({"var_names": ["bias"]}, {"var_list": [model.weights[1], model.weights[3]]}):
        trainer = trainer_of(model, adamw(**excluded))
        again = loaded(trainer, tmp_path)
        for built in (trainer._model, again):
            assert [built.optimizer._use_weight_decay(weight) for weight in built.weights] == [True, False] * 2
        assert canonical_form(adamw(**excluded)) != canonical_form(keras.optimizers.AdamW(0.1, weight_decay=0.5))
    model.layers[0].quantize("float8")  # a loaded layer has its weights in another order
    built = trainer_of(model, adamw(var_names=["bias"]))._model
    without = [weight.name for weight in built.weights if not built.optimizer._use_weight_decay(weight)]
    assert without == ["bias", "bias"]


def test_values_of_layers_that_get_config_does_not_return_are_kept(tmp_path):
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), Scaled(0.25)])
    trainer = trainer_of(model)
    assert trainer._model.layers[-1].factor == 0.25
    assert loaded(trainer, tmp_path).layers[-1].factor == 0.25
    model = encoder()
    model.slope = 3.0
    trainer = trainer_of(model)
    batch = rows(5)["x"].astype(np.float32)
    np.testing.assert_allclose(trainer._model(batch), model(batch), rtol=1e-6)
    np.testing.assert_allclose(loaded(trainer, tmp_path)(batch), model(batch), rtol=1e-6)


@pytest.mark.parametrize("words", [["a", "b c", "", "b c", "a"], ["a", "b\x85c", "ü"], ["a", "b", "a\nb", "c"]])
@pytest.mark.parametrize("kind", [keras.layers.StringLookup, keras.layers.TextVectorization])
def test_an_adapted_layer_keeps_an_empty_word_and_words_with_line_breaks(kind, words, tmp_path):
    layer = (
        kind(standardize=None, split=None, output_sequence_length=1)
        if kind is keras.layers.TextVectorization
        else kind()
    )
    layer.adapt(np.array(words))
    inputs = keras.Input((1,), dtype="string")
    outputs = keras.layers.Flatten()(keras.layers.Embedding(9, 2)(layer(inputs)))
    model = keras.Model(inputs, keras.layers.Dense(1)(outputs))
    batch = tf.constant([[word] for word in words])
    expected = model.predict(batch, verbose=0)
    built = model_from_bytes(model_to_bytes(model), {})
    Omissions.of(model).restore(built)
    np.testing.assert_array_equal(built.predict(batch, verbose=0), expected)
    artifact.save(tmp_path, model, {}, Ports((), "single"), Ports((), "single"))
    np.testing.assert_array_equal(artifact.load_model(tmp_path, compiled=False).predict(batch, verbose=0), expected)
    by_keras = keras.saving.load_model(tmp_path / artifact.MODEL)
    np.testing.assert_array_equal(by_keras.predict(batch, verbose=0), expected)
    layer.adapt(np.array(["d"]))  # saving leaves the layer unchanged


def test_characters_that_are_line_breaks_are_weighted_by_their_frequency(tmp_path):
    layer = keras.layers.TextVectorization(output_mode="tf_idf", split="character", standardize=None)
    layer.adapt(np.array(["a\nb", "b\rc", "\nb"]))
    inputs = keras.Input((1,), dtype="string")
    model = keras.Model(inputs, keras.layers.Dense(2)(layer(inputs)))
    batch = tf.constant([["a\nb"], ["\r"], ["d"]])
    artifact.save(tmp_path, model, {}, Ports((), "single"), Ports((), "single"))
    again = artifact.load_model(tmp_path, compiled=False)
    np.testing.assert_array_equal(again.predict(batch, verbose=0), model.predict(batch, verbose=0))


@pytest.mark.parametrize(
    "layer", [keras.layers.StringLookup(vocabulary=["a", "b"]), keras.layers.IntegerLookup(vocabulary=[1, 2])]
)
def test_a_vocabulary_that_replaced_the_one_of_the_constructor_is_kept(layer):
    original = layer.input_vocabulary
    layer.set_vocabulary(original[::-1])
    model = keras.Sequential([keras.Input((1,), dtype=layer.vocabulary_dtype), layer])
    built = model_from_bytes(model_to_bytes(model), {})
    assert built.layers[-1].get_vocabulary() == layer.get_vocabulary()
    assert layer.input_vocabulary == original, "saving leaves the layer unchanged"


class Glossary(keras.layers.Layer):
    """A layer with a ``get_vocabulary`` whose arguments differ from those of Keras's lookup layers."""

    def get_vocabulary(self, language):
        raise AssertionError(language)

    def call(self, values):
        return values


def test_layers_with_their_vocabulary_in_the_configuration_stay_unchanged(tmp_path):
    options = {"vocabulary": ["a", ""], "output_mode": "tf_idf", "idf_weights": [0.5, 0.25]}
    inputs = keras.Input((1,), dtype="string")
    model = keras.Model(inputs, Glossary()(keras.layers.StringLookup(**options)(inputs)))
    batch = tf.constant([["a"], [""], ["b"]])
    artifact.save(tmp_path, model, {"Glossary": Glossary}, Ports((), "single"), Ports((), "single"))
    again = artifact.load_model(tmp_path, compiled=False)
    np.testing.assert_array_equal(again.predict(batch, verbose=0), model.predict(batch, verbose=0))


def test_a_layer_with_lora_keeps_its_trainable_matrices_and_their_scale():
    model = network()
    model.layers[0].enable_lora(2)
    model.layers[0].lora_alpha = 6
    built = trainer_of(model)._model
    for one, other in zip(built.layers[0].weights, model.layers[0].weights, strict=True):
        np.testing.assert_array_equal(one, other)
    assert built.layers[0].lora_alpha == 6
    assert trained(built) == trained(model)
    model.layers[0].lora_kernel_a.assign(np.zeros((6, 2)))  # as Keras loads a model
    assert np.any(trainer_of(model)._model.layers[0].lora_kernel_a)


def test_a_trained_model_with_lora_can_learn_further(tmp_path):
    tokens = keras.Input((2,), dtype="int32")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(5, 4)(tokens))
    model = keras.Model(tokens, keras.layers.Dense(3)(embedded))
    for layer in (model.layers[1], model.layers[3]):
        layer.enable_lora(2)
        layer.lora_alpha = 6
        layer.trainable_variables[-1].assign(np.ones(layer.trainable_variables[-1].shape))
    artifact.save(tmp_path, model, {}, Ports((), "single"), Ports((), "single"))
    again, batch = artifact.load_model(tmp_path, compiled=False), np.array([[0, 1], [2, 4]])
    np.testing.assert_allclose(again(batch), model(batch), rtol=1e-4, atol=1e-5)
    for layer in (again.layers[1], again.layers[3]):
        assert layer.lora_alpha == 6
        assert [bool(np.any(matrix)) for matrix in layer.trainable_variables[-2:]] == [True, False]


class Weighted(keras.losses.Loss):
    def __init__(self, factor=1.0):
        super().__init__(name="weighted")
        self.factor = factor

    def call(self, labels, outputs):
        return self.factor * keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)

    def get_config(self):
        return {}


class Declared(Weighted):
    def get_config(self):
        return {"factor": self.factor}


class Slowing(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, base, power=1.0):
        self.base, self.power = base, power

    def __call__(self, step):
        return self.base / keras.ops.cast(step + 1, "float32") ** self.power

    def get_config(self):
        return {"base": self.base}


def test_a_class_that_would_be_rebuilt_with_another_argument_is_refused():
    PLUGIN.pack(parameters(loss=Declared(2.0)))
    PLUGIN.pack(parameters(loss=Weighted()))
    with pytest.raises(ParamError, match=r"Weighted has factor=2\.0, but its get_config\(\) does not return 'factor'"):
        PLUGIN.pack(parameters(loss=Weighted(2.0)))
    PLUGIN.pack(parameters(optimizer=keras.optimizers.SGD(Slowing(0.1))))
    with pytest.raises(ParamError, match=r"Slowing has power=0\.5"):
        PLUGIN.pack(parameters(optimizer=keras.optimizers.SGD(Slowing(0.1, 0.5))))


def test_a_loss_keeps_its_dtype():
    loss = keras.losses.MeanSquaredError(dtype="float64")
    assert from_configs(to_configs([loss]))[0].dtype == "float64"
    assert from_configs(to_configs([keras.losses.MeanSquaredError()]))[0].dtype == "float32"


def another_value(parameter):
    """Return a value other than a parameter's default, or None if the default is neither a boolean nor a float."""
    if isinstance(parameter.default, bool):
        return not parameter.default
    return parameter.default * 0.5 if isinstance(parameter.default, float) else None


@pytest.mark.parametrize("module", [keras.losses, keras.metrics])
def test_the_functions_of_losses_and_metrics_keep_their_arguments(module):
    base = keras.losses.Loss if module is keras.losses else keras.metrics.Metric
    tried = []
    for kind in vars(module).values():
        if not inspect.isclass(kind) or not issubclass(kind, base):
            continue
        for name, parameter in inspect.signature(kind).parameters.items():
            value = -2 if name == "axis" else another_value(parameter)
            required = [p for p in inspect.signature(kind).parameters.values() if p.default is inspect.Parameter.empty]
            if value is None or required:
                continue
            original = kind(**{name: value})
            if not (arguments := getattr(original, "_fn_kwargs", None)):
                continue
            again = from_configs(pickle.loads(pickle.dumps(to_configs({"one": [original]}))))["one"][0]
            assert again._fn_kwargs == arguments, (kind, name)
            tried.append((kind.__name__, name))
    assert ("Huber", "delta") in tried or ("CosineSimilarity", "axis") in tried
    assert len(set(tried)) > 5


def test_a_model_is_returned_compiled_with_the_arguments_of_its_losses_and_metrics(tmp_path):
    params = parameters(
        loss=keras.losses.Huber(delta=0.1), metrics=[keras.metrics.CosineSimilarity(axis=0)], label_shapes=[[1]]
    )
    trainer = PLUGIN.trainer(PLUGIN.pack(params), spec(DATA), World(0, 1, 0, 1, 0, 1))
    again = loaded(trainer, tmp_path)
    inputs, targets = rows(8)["x"].astype(np.float32), np.random.default_rng(6).normal(size=(8, 3)).astype(np.float32)
    outputs = again(inputs)
    evaluated = again.evaluate(inputs, targets, return_dict=True, verbose=0)
    loss = float(keras.losses.Huber(delta=0.1)(targets, outputs)) + sum(map(float, again.losses))
    assert evaluated["loss"] == pytest.approx(loss, rel=1e-3)
    expected = keras.metrics.CosineSimilarity(axis=0)
    expected.update_state(targets, outputs)
    assert evaluated["cosine_similarity"] == pytest.approx(float(expected.result()), rel=1e-5)


@pytest.mark.parametrize("weights", [{"end": 0.5}, [0.5], 0.5])
def test_weights_of_losses_may_be_a_dict_a_list_or_a_number(weights):
    inputs = keras.Input((6,))
    model = keras.Model(inputs, keras.layers.Dense(3, name="end")(inputs))
    loss = {"end": keras.losses.SparseCategoricalCrossentropy()} if isinstance(weights, dict) else "mse"
    params = parameters(model=model, loss=loss, loss_weights=weights, metrics=None)
    batch = {"x": rows(4)["x"], "y": rows(4)["y"]}
    if loss == "mse":
        params["label_shapes"] = [[1]]
    assert PLUGIN.check(params, DATA, batch) == [(3,)]
    trainer = PLUGIN.trainer(PLUGIN.pack(params), spec(DATA), World(0, 1, 0, 1, 0, 1))
    assert trainer._package.loss_weights == weights


@pytest.fixture
def double_precision():
    """Make Keras compute in float64 during a test; yield the previous settings."""
    before = KerasSettings.current()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield before
    before.apply()


def test_nested_layers_have_the_dtype_of_the_drivers_settings(double_precision, tmp_path):
    packed = PLUGIN.pack(parameters(model=encoder()))
    double_precision.apply()  # the settings of another process
    trainer = PLUGIN.trainer(packed, spec(DATA), World(0, 1, 0, 1, 0, 1))
    assert trainer._model.inner.compute_dtype == keras.config.floatx() == "float64"
    again = loaded(trainer, tmp_path)
    double_precision.apply()
    # Saved again, with the settings of this process: nested layers take their dtype from the settings of the save.
    assert loaded(trainer, tmp_path).inner.compute_dtype == "float32"
    assert again.inner.compute_dtype == "float64"
    assert keras.config.floatx() == "float32"


def test_a_model_may_return_a_list_with_one_output():
    inputs = keras.Input((6,))
    model = keras.Model(inputs, [keras.layers.Dense(3)(inputs)])
    assert plan_outputs(model, DATA.of("label"), None).structure == "list"
    assert PLUGIN.check(parameters(model=model), DATA, rows(4)) == [(3,)]


def test_entries_of_other_versions_are_ignored():
    assert Omissions.from_json({"trained": [True], "vocabularies": []}) == Omissions(trained=(True,))
