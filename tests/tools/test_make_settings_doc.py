"""The reference of settings is what the schema says."""

from megarl.config.settings import all_settings
from tools.make_settings_doc import PAGE, settings_page


def test_settings_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == settings_page(), "run `make docs`"


def test_every_setting_has_a_meaning_on_the_page() -> None:
    missing = [name for name, setting in all_settings().items() if not setting.doc]
    assert missing == []
