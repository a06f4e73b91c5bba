"""The replay page in a real browser: what it computes, how one walks through it, and that nothing in a file can act.

uv run --extra cpu --group browser pytest -m slow tests/test_replay_browser.py      # with Debian's chromium or Chrome
"""

import json
import re
import shutil
from dataclasses import dataclass, field

import pytest
from test_replay import FAIL, GO, HEAT, SEE, TAKE, TAKE_MUG, trajectory, turn, write

import analysis
from rollout import wilson_interval

pytestmark = pytest.mark.slow
BINARIES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: --group browser")
    binary = next(filter(None, map(shutil.which, BINARIES)), None)
    if binary is None:
        pytest.skip(f"no browser: none of {', '.join(BINARIES)} is installed")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield started
        started.close()


@dataclass
class Opened:
    """A page and whatever happened in it that must not happen."""

    page: object
    address: str
    events: list[str] = field(default_factory=list)

    def go(self, view: str) -> None:
        self.page.goto(f"{self.address}#{view}")
        self.page.wait_for_selector("main > section:not([hidden])")


@pytest.fixture
def opened(browser, tmp_path):
    """Opens the page of some files; in the end no script ran but the page's, no request left, no error came."""
    windows = []

    def open_page(*files, view: str = "list", width: int = 1200, **context) -> Opened:
        analysis.main(["--replay", *map(str, files), "--output", str(tmp_path / "replay.html")])
        window = browser.new_context(viewport={"width": width, "height": 800}, **context)
        one = Opened(window.new_page(), (tmp_path / "replay.html").as_uri())
        one.page.on("console", lambda message: one.events.append(f"console {message.type}: {message.text}"))
        one.page.on("pageerror", lambda error: one.events.append(f"error: {error}"))
        one.page.on("dialog", lambda dialog: one.events.append(f"dialog: {dialog.message}") or dialog.dismiss())
        one.page.on("popup", lambda popup: one.events.append(f"window: {popup.url}"))
        window.on(
            "request",
            lambda request: (
                None if request.url.split("#")[0] == one.address else one.events.append(f"request: {request.url[:100]}")
            ),
        )
        windows.append((window, one))
        one.go(view)
        return one

    yield open_page
    for window, one in windows:
        assert one.page.evaluate("typeof hacked") == "undefined"
        assert one.events == []
        window.close()


def games(name: str, tmp_path, wins: str, turns=(GO, SEE, TAKE), **more):
    rows = [trajectory(list(turns), won == "1", number=number, **more) for number, won in enumerate(wins)]
    return write(tmp_path / name, *rows, {"type": "summary"})


def texts(page, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


# --- what it computes -----------------------------------------------------------------------------------------------


def test_its_statistics_are_those_of_the_program(opened, tmp_path):
    page = opened(games("a.jsonl", tmp_path, "10")).page
    for wins, played in ((0, 1), (1, 1), (3, 8), (0, 274), (145, 274), (274, 274)):
        assert page.evaluate(f"wilson({wins}, {played})") == pytest.approx(wilson_interval(wins, played), abs=1e-12)
    for b, c in ((0, 0), (1, 0), (9, 2), (35, 26), (60, 16), (1000, 1300)):
        assert page.evaluate(f"mcnemar({b}, {c})") == pytest.approx(analysis.mcnemar_exact(b, c), rel=1e-9)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a <tool_call>b</tool_call>", [["thought", "a "], ["call", "<tool_call>b</tool_call>"]]),
        ("<tool_call>b</tool_call>\n", [["call", "<tool_call>b</tool_call>"]]),
        ("<tool_call>b</tool_call> c", [["call", "<tool_call>b</tool_call>"], ["after the call", " c"]]),
        ("a<tool_call>b", [["thought", "a"], ["call", "<tool_call>b"]]),
        ("a</tool_call>", [["thought", "a</tool_call>"]]),
        ("", [["thought", ""]]),
    ],
)
def test_thought_and_call_stand_apart(opened, tmp_path, text, parts):
    page = opened(games("a.jsonl", tmp_path, "1")).page
    found = page.evaluate("text => partsOf(text).map(([kind, from, to]) => [kind, text.slice(from, to)])", text)
    assert found == parts


def test_the_list_filters_searches_and_sorts_and_counts_what_it_shows(opened, tmp_path):
    one = games("one.jsonl", tmp_path, "1100", split="valid_seen")
    two = write(
        tmp_path / "two.jsonl",
        *[
            trajectory(
                [GO] * number,
                number=number,
                split="valid_unseen",
                task_type="pick_two_obj_and_place",
                reward=-number,
                task=f"put two pen in box {number}.",
                steps=number,
                invalid_actions=2 * number,
            )
            for number in (1, 12, 3)
        ],
    )
    page = opened(one, two).page

    def shown(query: str = "", **choices: str) -> tuple[str, list[str]]:
        page.evaluate("byId('filter').reset()")
        for name, label in choices.items():
            page.select_option(f"#{name}", label=label)
        page.fill("#query", query)
        return page.inner_text("#count"), texts(page, "#rows tbody td:first-child a")

    low, high = wilson_interval(2, 7)
    assert shown()[0] == f"7 of 7 shown; 2 won, 28.6 % (95 % interval {100 * low:.1f} to {100 * high:.1f})"
    assert shown(file="two.jsonl")[0].startswith("3 of 7 shown; 0 won, 0.0 % (95 % interval 0.0 to ")
    assert shown(split="valid_seen", result="lost")[0].startswith("2 of 7")
    assert shown(task_type="pick two & place")[0].startswith("3 of 7")
    assert shown(why="not yet cleaned, heated or cooled")[0].startswith("2 of 7")
    assert shown("PEN IN BOX 12")[1] == ["put two pen in box 12."]
    assert shown("you pick up the egg")[0].startswith("4 of 7")  # what was seen
    assert shown("steps>2 steps<=3 reward<-2")[1] == ["put two pen in box 3."]
    assert shown("invalid>=6 box 12")[1] == ["put two pen in box 12."]
    assert shown("advantage>-100") == ("0 of 7 shown", [])
    shown(file="two.jsonl")
    for clicks, order in ((1, [12, 3, 1]), (2, [1, 3, 12])):
        page.click("#rows th >> text=steps")
        assert texts(page, "#rows tbody td:first-child a") == [f"put two pen in box {number}." for number in order], (
            clicks
        )
    assert page.get_attribute("#rows th[aria-sort]", "aria-sort") == "ascending"
    page.click("#rows th >> text=task type")
    assert len(texts(page, "#rows tbody tr")) == 3


def test_the_branches_of_a_group_stand_together(opened, tmp_path):
    rewards = {1: [1.0, -0.5], 2: [0.5, 0.0]}
    paths = [
        write(
            tmp_path / f"update-000{update}.jsonl",
            *[
                trajectory(
                    [GO],
                    reward > 0,
                    number=number,
                    branch=branch,
                    update=update,
                    reward=reward,
                    task=f"put a pen {number} in box.",
                )
                for number in rewards
                for branch, reward in enumerate(rewards[number])
            ],
        )
        for update in (3, 4)
    ]
    page = opened(*paths).page
    assert texts(page, "tr.group") == [
        f"update {update} · group of 2, 1 won, mean reward 0.250 · put a pen {number} in box.\ngame-{number}/trial"
        for update in (3, 4)
        for number in (1, 2)
    ]
    page.select_option("#file", label="update-0004.jsonl")
    assert texts(page, "tr.branch a") == ["branch 0", "branch 1"] * 2
    assert texts(page, "td[data-name=advantage]") == ["0.750", "−0.750", "0.250", "−0.250"]
    page.click("#rows th >> text=reward")
    page.click("#rows th >> text=reward")  # the lowest first
    assert texts(page, "td[data-name=reward]") == ["−0.5", "1.0", "0.0", "0.5"]
    page.uncheck("#groups")
    assert texts(page, "td[data-name=reward]") == ["−0.5", "0.0", "0.5", "1.0"]
    assert not texts(page, "tr.group") and texts(page, "#rows a")[0] == "put a pen 1 in box."


# --- walking --------------------------------------------------------------------------------------------------------


def test_a_trajectory_is_walked_by_keys_and_by_the_strip(opened, tmp_path):
    turns = [GO, FAIL, turn(None), SEE, TAKE, turn("move egg 2 to fridge 1", "You move it.", "won", advantage=0.125)]
    page = opened(games("a.jsonl", tmp_path, "11", turns)).page

    def current() -> tuple[str, str]:
        return page.inner_text(".turn.now h3"), page.inner_text("#strip [aria-current]")

    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("#trajectory:not([hidden])")
    assert page.inner_text("#task") == "put a hot egg in fridge."
    assert page.inner_text("#facts").startswith("won\nsteps 6\ninvalid 1\nreward 0.9")
    assert len(texts(page, "#strip button")) == 6
    assert current()[0].startswith("1\ngo to shelf 1\nexecuted")
    page.keyboard.press("j")
    assert current()[0].startswith("2\ntake egg 2 from table 1\nnot admissible\n∅ changed nothing")
    page.keyboard.press("ArrowRight")
    assert current()[0].startswith("3\nno action\nmalformed\n∅ changed nothing")
    for key in "kkkk":
        page.keyboard.press(key)
    assert current()[0].startswith("1\n")
    page.click("#strip button:nth-child(6)")
    assert current()[0].endswith("won\nadvantage 0.125")
    assert page.evaluate("document.activeElement === document.querySelector('.turn.now')")
    page.keyboard.press("ArrowLeft")
    assert texts(page, ".turn.now .label") == ["thought", "call", "observation"]
    assert (
        texts(page, ".turn.now pre")[0] == "I think."
        and "<parameter=action>take egg 2" in texts(page, ".turn.now pre")[1]
    )
    page.click(".turn.now summary")
    assert texts(page, ".turn.now li") == ["look"]
    page.keyboard.press("]")
    page.wait_for_function("location.hash === '#t1'")
    page.keyboard.press("Escape")
    page.wait_for_selector("#list:not([hidden])")
    page.keyboard.press("/")
    page.keyboard.type("jk")
    assert page.input_value("#query") == "jk"


def test_tokens_are_shaded_and_tell_their_probability_on_hover_and_by_keyboard(opened, tmp_path):
    tokens, logprobs = ["I ", "think", "<tool_call>", "x", "</tool_call>"], [0.0, -3.0, -0.5, -0.1, -0.2]
    page = opened(
        games("a.jsonl", tmp_path, "1", [turn("look", "Dark.", tokens=tokens, logprobs=logprobs)]), view="t0"
    ).page
    assert texts(page, ".tokens") == ["I think", "<tool_call>x</tool_call>"]
    shades = page.eval_on_selector_all(
        ".tokens span", "spans => spans.map(span => getComputedStyle(span).backgroundColor)"
    )
    assert len(set(shades)) == 5
    assert texts(page, ".tokens .rare") == ["think"]
    page.hover(".tokens span >> nth=1")
    assert page.inner_text("output").endswith("token 2 of 5: log-probability −3.000, probability 0.0498")
    page.focus(".tokens >> nth=1")
    assert page.inner_text("output").endswith("token 3 of 5: log-probability −0.500, probability 0.607")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("output").endswith("token 4 of 5: log-probability −0.100, probability 0.905")
    assert page.inner_text("#strip [aria-current]").startswith("1")


def test_two_files_are_compared_game_by_game_and_turn_by_turn(opened, tmp_path):
    base, trained = (
        games("base.jsonl", tmp_path, "110010"),
        games("trained.jsonl", tmp_path, "1011011", [GO, SEE, TAKE_MUG, HEAT]),
    )
    page = opened(base, trained, view="compare").page
    assert page.inner_text("#verdict") == (
        "6 games in both: 1 won by both, 2 only by A, 3 only by B, 0 by neither. Exact McNemar test: p = 1.0. "
        "Of several trajectories of a game the first counts."
    )
    assert texts(page, "#pairs td[data-name='won by']") == ["only A", "only B", "only B", "only A", "only B"]
    page.select_option("#outcome", label="won only by A")
    assert (
        texts(page, "#pairs td[data-name=A]") == ["won in 3"] * 2
        and texts(page, "#pairs td[data-name=B]") == ["lost in 4"] * 2
    )
    page.click("#pairs a >> nth=0")
    page.wait_for_selector("#trajectory:not([hidden])")
    assert page.inner_text(".differ") == "turn 3: from here they differ"
    assert page.inner_text("#turns > details summary >> nth=0") == "the first 2 turns are the same"
    now = texts(page, ".two.now h3")
    assert now[0].startswith("3\ntake egg 2") and now[1].startswith("3\ntake mug 1")
    page.keyboard.press("j")
    assert page.inner_text(".two.now > p") == "ended" and texts(page, ".two.now h3")[0].startswith("4\nheat egg 2")
    for key in "kkk":
        page.keyboard.press(key)
    assert page.is_visible(".two.now h3 >> nth=0") and texts(page, ".two.now h3")[0] == texts(page, ".two.now h3")[1]
    page.keyboard.press("Escape")
    page.wait_for_selector("#compare:not([hidden])")


def test_the_reasons_for_losses_lead_to_the_lost(opened, tmp_path):
    page = opened(games("a.jsonl", tmp_path, "100", [SEE, TAKE_MUG]), view="lost").page
    assert page.inner_text("#lost-count") == "2 of 3 lost"
    page.click("#lost-table tr:has-text('wrong object') button >> nth=1")
    page.wait_for_selector("#list:not([hidden])")
    assert page.inner_text("#count").startswith("2 of 3 shown; 0 won") and page.input_value("#why") == "wrong object"
    assert texts(page, "#rules dt") == list(analysis.LOSS_REASONS)


# --- what it looks like ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "scheme"), [(400, "light"), (400, "dark"), (700, "light"), (950, "light"), (1050, "light")]
)
def test_every_view_fits_its_window_and_can_be_read(opened, tmp_path, width, scheme):
    long = turn("go to " + "x" * 300, "y" * 3000)
    path, other = games("a" * 90 + ".jsonl", tmp_path, "10", [long, GO]), games("b.jsonl", tmp_path, "01", [GO])
    group = write(tmp_path / "c.jsonl", *[trajectory([SEE, TAKE], branch=branch) for branch in range(3)])
    one = opened(path, other, group, width=width, color_scheme=scheme)
    for view in ("list", "t0", "p0-2", "lost", "compare"):
        one.go(view)
        assert one.page.evaluate("document.documentElement.scrollWidth") <= width, view
    ink, paper = one.page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        ".map(text => text.match(/\\d+/g).reduce((sum, part) => sum + Number(part), 0))"
    )
    assert ink < 150 < 600 < paper if scheme == "light" else paper < 150 < 600 < ink


# --- hostile files --------------------------------------------------------------------------------------------------

HOSTILE = (
    "<script>hacked = 1</script>", "</script><script>hacked = 1</script>", "<img src=x onerror=hacked=1>",
    "javascript:hacked=1", "<svg onload=hacked=1>", "<iframe src='javascript:parent.hacked=1'></iframe>",
    "<a href='javascript:hacked=1' id=data>x</a>", "'\"><style>*{display:none}</style>",
    "<meta http-equiv=refresh content='0;url=http://127.0.0.1:9/'>", "{{DATA}}", "${hacked = 1}",
    "<link rel=stylesheet href=http://127.0.0.1:9/x>", "<template><script>hacked=1</script></template>",
    "__proto__", "constructor", "-->", "]]>", "&lt;b&gt;", "a\u202eb\u2066c\u200bd", "half \ud83d character",
    "\x00\x1b[31m\r", "\u2028", "%s{0}",
)  # fmt: skip


def test_a_hostile_file_is_shown_as_text_and_does_nothing(opened, tmp_path):
    def hostile(text: str, number: int, won: bool) -> dict:
        turns = [
            turn(text, text, status=text, admissible=[text, "look"], error=text, tokens=["a", text], logprobs=[-1, -2]),
            turn(text, text, admissible=[text]),
            turn(None),
        ]
        record = trajectory(
            turns, won, task=text, split=text, task_type=text, game_id=text, stop_reason=text, branch=number
        )
        record["messages"][0]["role"] = text
        for message in record["messages"]:
            message["content"] += text
        return record

    files = []
    for name, wins in ((f"{HOSTILE[0].replace('/', '')}.jsonl", 1), ("javascript:hacked=1.jsonl", 0)):
        records = [hostile(text, number, number % 2 == wins) for number, text in enumerate(HOSTILE)]
        files.append(write(tmp_path / name, *records, '{"<img src=x onerror=hacked=1>', "\x00<b>", {"type": "summary"}))
    one = opened(*files)
    page = one.page
    assert page.inner_text("#count").startswith(f"{2 * len(HOSTILE)} of ")
    assert texts(page, "#rows tbody td:first-child a")[:15] == list(HOSTILE[:15])
    page.click("#left-out summary")
    assert len(texts(page, "#left-out li")) == 4
    for number in range(len(HOSTILE)):
        one.go(f"t{number}")
        page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true; })")
        page.wait_for_selector(".turn li")
        for key in "jjk":
            page.keyboard.press(key)
        page.hover(".tokens span >> nth=0")
        page.wait_for_selector("output:has-text('log-probability')")
        one.go(f"p{number}-{number + len(HOSTILE)}")
        page.keyboard.press("j")
    page.evaluate("location.hash = '#t0'")
    page.wait_for_function("byId('task').textContent === '<script>hacked = 1</script>'")
    one.go(f"t{HOSTILE.index('a\u202eb\u2066c\u200bd')}")
    assert texts(page, "#task .mark") == ["U+202E", "U+2066", "U+200B"]
    assert page.inner_text("#task") == "aU+202EbU+2066cU+200Bd"
    one.go(f"t{HOSTILE.index('half \ud83d character')}")
    assert page.inner_text("#task") == "half U+D83D character"
    one.go("list")
    for name in ("file", "split", "task_type", "why"):
        for option in range(len(page.query_selector_all(f"#{name} option"))):
            page.select_option(f"#{name}", index=option)
        page.select_option(f"#{name}", index=0)
    for query in HOSTILE[:15]:
        page.fill("#query", query)
        assert not page.inner_text("#count").startswith("0 "), query
    one.go("compare")
    assert f"{len(HOSTILE)} games in both" in page.inner_text("#verdict")
    one.go("lost")
    page.click("#lost-table button >> nth=0")
    addresses = page.eval_on_selector_all("a[href]", "links => links.map(link => link.getAttribute('href'))")
    assert all(re.match(r"#([tp]\d|list|lost|compare)", address) for address in addresses)
    assert page.evaluate("document.querySelectorAll('script').length") == 2


def test_tokens_and_texts_of_a_megabyte_do_not_stop_it(opened, tmp_path):
    large = "<b>\u202e" + "z" * 2**20
    page = opened(
        games("a.jsonl", tmp_path, "1", [turn("look", large, tokens=[large], logprobs=[-1.0])], task=large), view="t0"
    ).page
    assert page.inner_text("#task").startswith("<b>U+202Ezzz")
    button = page.locator(".turn button", has_text="all 1,048,580 characters")
    assert button.count() == 2
    button.last.click()
    assert len(page.inner_text(".turn pre >> nth=-1")) > 2**20


def test_a_damaged_page_says_so(browser, tmp_path):
    analysis.main(["--replay", str(games("a.jsonl", tmp_path, "1")), "--output", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text()
    start = text.index("octet-stream") + 40
    (tmp_path / "page.html").write_text(text[:start] + "AAAA" + text[start + 4 :])
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_selector("#message:has-text('This page cannot be read')")
    page.close()


def test_a_page_served_under_a_policy_of_its_own_hashes_works(browser, tmp_path):
    """A server may repeat the page's policy in a header; frames may sandbox it."""
    analysis.main(["--replay", str(games("a.jsonl", tmp_path, "1")), "--output", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text()
    policy = text.split('http-equiv="Content-Security-Policy" content="')[1].split('"')[0]
    page = browser.new_page()
    page.route(
        "http://replay.test/**",
        lambda route: route.fulfill(
            body=text, content_type="text/html", headers={"Content-Security-Policy": policy + "; sandbox allow-scripts"}
        ),
    )
    page.goto("http://replay.test/page.html#t0")
    page.wait_for_selector("#trajectory:not([hidden])")
    assert json.loads(page.evaluate("JSON.stringify(data.files)")) == ["a.jsonl"]
    page.close()
