"""The whole page in a browser: silent, self-contained, usable with a keyboard, on a phone, in the dark and on paper."""


def test_nothing_is_logged_and_nothing_is_requested(open_page, report):
    opened = open_page(report)
    opened.page.mouse.wheel(0, 100_000)  # Images further down are decoded when they are seen.
    opened.page.wait_for_timeout(200)
    opened.assert_silent(report)
