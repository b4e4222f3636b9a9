"""Adapters that transformers adds by itself, with no release of PEFT but those it takes."""

from __future__ import annotations

import pytest
from transformers.integrations.peft import MIN_PEFT_VERSION

from nsa_flex.installed import at_least

takes_own_adapters = pytest.mark.skipif(
    not at_least("peft", MIN_PEFT_VERSION), reason=f"transformers wants peft {MIN_PEFT_VERSION}"
)
