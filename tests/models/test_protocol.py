"""What the trainer asks of a model, and what it says where something is missing."""

import pytest

from perex_t5x.errors import ConfigError
from perex_t5x.models import protocol
from tests.models.model_support import decoder_only

ABILITIES = ("SummarizesMetrics", "CountsFlops", "ShardsDimensions", "Scores", "Predicts")


def test_language_models_have_every_ability():
    model = decoder_only()
    for name in ("Model", *ABILITIES):
        assert protocol.has(model, getattr(protocol, name)), name


def test_a_model_without_any():
    class Nothing:
        pass

    model = Nothing()
    with pytest.raises(
        ConfigError, match="MODEL = Nothing has no FEATURE_CONVERTER_CLS, get_initial_variables, loss_fn, .*"
    ):
        protocol.require(model, protocol.Model, "training")
    assert not any(protocol.has(model, getattr(protocol, name)) for name in ABILITIES)
    assert protocol.sharded_dimensions(model) == {}


def test_members_may_come_from_getattr():
    """As those of a model that wraps another."""

    class Wrapper:
        def __getattr__(self, name):
            if name != "score_batch":
                raise AttributeError(name)
            return lambda params, batch: None

    assert protocol.has(Wrapper(), protocol.Scores) and not protocol.has(Wrapper(), protocol.Predicts)


def test_the_feature_converter_is_a_class_or_a_method():
    class AsClass:
        FEATURE_CONVERTER_CLS = dict

    class AsMethod:
        def FEATURE_CONVERTER_CLS(self):  # noqa: N802 (T5X's name)
            return dict

    assert protocol.feature_converter_cls(AsClass()) is protocol.feature_converter_cls(AsMethod()) is dict
