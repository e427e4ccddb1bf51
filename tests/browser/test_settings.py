"""The pack's settings in the editor: their defaults, and where their values go."""

import pytest

from comfy_client import ComfyClient

pytestmark = pytest.mark.browser

LIMIT = "Atelier.KeptLimit"


@pytest.mark.parametrize("opened", ["litegraph"], indirect=True)  # the dialog is the same in both renderers
def test_the_limit_of_the_cache_is_a_setting(editor, comfy: ComfyClient) -> None:
    assert editor.run("id => window.app.extensionManager.setting.get(id)", LIMIT) == 20
    editor.run("id => window.app.extensionManager.setting.set(id, 5)", LIMIT)
    try:
        assert comfy.get(f"/settings/{LIMIT}") == 5
        editor.run("() => window.app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
        editor.page.get_by_role("dialog").get_by_text("LoRA Atelier", exact=True).first.click()
        editor.page.get_by_text("Limit in gigabytes").first.wait_for()
        kept = editor.page.locator(".atelier-kept")
        kept.get_by_text("encoded pictures and captions").wait_for()
        editor.settle()
        editor.screenshot(f"settings-{editor.version}")
        kept.get_by_role("button", name="Clear").click()
        kept.get_by_text("0 B: encoded pictures and captions 0 B").wait_for()
    finally:
        editor.run("id => window.app.extensionManager.setting.set(id, 20)", LIMIT)
        editor.page.keyboard.press("Escape")
