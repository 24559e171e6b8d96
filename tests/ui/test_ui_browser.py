"""The live page in a real browser: it shows a running federation, continues after a restart, and starts and stops
jobs with the token; it works with the keyboard, with a screen reader, in dark mode and on a narrow screen."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from league import PARTIES, League

from digits import digits
from hansa.net.local import free_port

playwright = pytest.importorskip("playwright.sync_api", reason="the live page is not tried: there is no Playwright")

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip(
        "there is no Chromium on this machine: the live page is not tried in a browser", allow_module_level=True
    )

expect: Any = playwright.expect
PATIENT = 600_000.0  # milliseconds; a slow machine takes its time
LONG = {"task": {"parties": ["x"], "model": "logistic"}, "run": {"rounds": 100_000}}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENT)
        yield browser
        browser.close()


class Sight:
    """A page under observation: its console messages, and its requests to other servers."""

    def __init__(self, browser: Any, url: str, **given: Any) -> None:
        self.context = browser.new_context(**given)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENT)
        expect.set_options(timeout=PATIENT)
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        own = url.partition("#")[0]
        self.page.on(
            "console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda asked: None if asked.url.startswith(own) else self.elsewhere.append(asked.url))
        self.page.goto(url)

    def close(self, *besides: str) -> None:
        """Check that the page had no errors except those named here."""
        self.context.close()
        assert [error for error in self.errors if not any(re.search(one, error) for one in besides)] == []
        assert self.elsewhere == []

    def number(self, locator: Any) -> int:
        return int(locator.get_attribute("data-points") or 0)

    def until(self, found: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENT / 1000
        while not found():
            assert time.monotonic() < end, self.page.inner_text("main")
            self.page.wait_for_timeout(50)


@pytest.fixture(scope="module")
def league(tmp_path_factory: pytest.TempPathFactory) -> Iterator[League]:
    """A federation with a long job, whose page keeps its port."""
    league = League(tmp_path_factory.mktemp("live") / "league", admin=f"127.0.0.1:{free_port()}")
    league.join_all()
    yield league
    league.close()


@pytest.fixture
def job(league: League) -> Iterator[str]:
    id = league.submit(LONG, "heart")
    yield id
    league.runner.stop(id)
    league.ended_after_all(id)


def url(league: League) -> str:
    return f"http://127.0.0.1:{league.aggregator.admin.port}/"


def token(league: League) -> str:
    return (league.folder / "admin-token").read_text().strip()


@pytest.fixture
def sight(browser: Any, league: League) -> Iterator[Sight]:
    sight = Sight(browser, url(league))
    yield sight
    sight.close()


def test_it_shows_a_running_federation_as_it_goes_on(sight: Sight, league: League, job: str) -> None:
    page = sight.page
    expect(page.get_by_role("heading", name="league", level=1)).to_be_visible()
    expect(page.locator("#link")).to_have_attribute("data-state", "live")
    expect(page.locator("#now-job")).to_have_text(job)
    expect(page.locator("#now-round")).to_contain_text("of 100,000 closed")
    for name in PARTIES:
        row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=name, exact=True))
        expect(row).to_contain_text("connected")
        expect(row).to_contain_text("ago")
    curve = page.locator("figure", has_text="Loss").locator("path.curve").first
    before = sight.number(curve)
    sight.until(lambda: sight.number(curve) > before + 3)
    page.get_by_text("The numbers, the last 50 rounds").click()
    rows = page.locator("#numbers tbody tr")
    first = int(rows.first.locator("th").inner_text().replace(",", ""))
    sight.until(lambda: int(rows.first.locator("th").inner_text().replace(",", "")) > first)
    expect(page.locator("#facts")).to_contain_text("3 of 3 replies in it")
    expect(page.locator("#facts")).to_contain_text("training")
    expect(page.locator("#log")).to_contain_text("verifies: all")
    root = page.locator("#log dd").last.inner_text()
    heads = {json.loads(row["head"])["root"] for row in league.ledger.all("SELECT head FROM rounds")}
    assert root in heads, "what is shown is a head that was signed"


def test_it_goes_on_by_itself_when_the_aggregator_was_away(browser: Any, league: League, job: str) -> None:
    sight = Sight(browser, url(league))
    closed = sight.page.locator("#now-round")
    expect(closed).to_contain_text(re.compile(r"Round [1-9]"))
    league.stop()
    expect(sight.page.locator("#link")).to_have_attribute("data-state", "lost")
    expect(sight.page.locator("#link-text")).to_contain_text(re.compile(r"not connected; last heard \d+ \w+ ago"))
    before = closed.inner_text()
    league.start()
    expect(sight.page.locator("#link")).to_have_attribute("data-state", "live")
    expect(closed).not_to_have_text(before)
    rounds = sight.page.evaluate(f"rounds[{job!r}].map(line => line.round)")
    assert rounds == list(range(1, len(rounds) + 1)), "none is missing, none is there twice"
    sight.close(
        "ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_EMPTY_RESPONSE", "ERR_CONNECTION_RESET"
    )


def test_it_stops_a_job_with_the_token_and_with_no_other(browser: Any, league: League, job: str) -> None:
    sight = Sight(browser, url(league))
    page = sight.page
    asked: list[str] = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
    stop = page.get_by_role("button", name=f"Stop {job}")
    stop.click()
    expect(page.locator("#answer")).to_have_text("Enter the admin token first.")
    expect(page.get_by_label("Admin token")).to_be_focused()
    page.get_by_label("Admin token").fill("a wrong one")
    page.get_by_role("button", name="Use it").click()
    expect(page.locator("#answer")).to_contain_text("Refused: this is not the admin token")
    expect(page.get_by_label("Admin token")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#start-form")).to_be_hidden()
    assert not asked and league.shown(job)["status"] == "running"
    page.get_by_label("Admin token").fill(token(league))
    page.keyboard.press("Enter")
    expect(page.locator("#answer")).to_contain_text("The token is valid")
    stop.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#now-status")).to_have_text("stopped")
    expect(page.locator("#now-reason")).to_have_text("stopped by the operator")
    expect(stop).to_have_count(0)
    (question,) = asked
    assert question.startswith(f"Stop {job}?") and "checkpoint is deleted, and there will be no model" in question
    assert league.shown(job)["status"] == "stopped"
    assert token(league) not in page.content() and page.evaluate("sessionStorage.length + localStorage.length") == 0
    assert page.evaluate("document.cookie") == ""
    sight.close("401")


def test_it_starts_a_job_from_a_file(sight: Sight, league: League, tmp_path: Path) -> None:
    page = sight.page
    page.get_by_label("Admin token").fill(token(league))
    page.get_by_role("button", name="Use it").click()
    (tmp_path / "small.toml").write_text('[task]\nparties = ["x"]\nmodel = "logistic"\n[run]\nrounds = 2\n')
    page.get_by_label("An experiment file").set_input_files(tmp_path / "small.toml")
    expect(page.get_by_label("Name")).to_have_value("small")
    page.get_by_role("button", name="Start it").click()
    expect(page.locator("#answer")).to_contain_text("Started small-1.")
    expect(page.locator("#now-job")).to_have_text("small-1")
    expect(page.locator("#now-status")).to_have_text("finished")
    expect(page.locator("#now-round")).to_have_text("Round 2 of 2 closed")


def test_what_others_wrote_is_shown_as_text(sight: Sight, league: League) -> None:
    evil = "<img src=x onerror=document.title='hacked'><script>document.title='hacked'</script>"
    id = league.submit({**LONG, "run": {"rounds": 1}}, "evil")
    league.ended(id)
    league.ledger.now(lambda db: db.run("UPDATE jobs SET reason = ? WHERE id = ?", evil, id).rowcount)
    expect(sight.page.locator("#jobs tbody")).to_contain_text(evil)
    assert sight.page.locator("main img, main script").count() == 0 and "hacked" not in sight.page.title()


def test_a_job_can_be_chosen_and_the_focus_stays_where_it_was(sight: Sight, league: League, job: str) -> None:
    page = sight.page
    ended = league.submit({**LONG, "run": {"rounds": 3}}, "short")
    button = page.get_by_role("button", name=f"Show {ended}")
    button.focus()
    curve = page.locator("#now-bar")
    before = curve.get_attribute("value")
    sight.until(lambda: curve.get_attribute("value") != before)
    expect(button).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#now-job")).to_have_text(ended)
    expect(page.locator("main")).to_be_focused()
    expect(page.locator("#jobs tr[aria-current]")).to_contain_text(ended)


# Accessibility

RATIO = """
(scheme) => {
  const light = (c) => { const v = c / 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number);
    return { c: n.slice(0, 3), a: n.length > 3 ? n[3] : 1 }; };
  const luminance = (c) => 0.2126 * light(c[0]) + 0.7152 * light(c[1]) + 0.0722 * light(c[2]);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const b = parse(getComputedStyle(e).backgroundColor);
      if (b.a > 0.99) return b.c;
    }
    return scheme === "dark" ? [0, 0, 0] : [255, 255, 255];
  };
  const out = [];
  const seen = (e) => e.getClientRects().length > 0 && !e.closest(".unseen, .skip");
  for (const e of document.querySelectorAll("body *")) {
    const svg = e instanceof SVGElement, shape = e.matches("svg .curve");
    const text = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!seen(e) || !(text || shape) || e.matches("[disabled], option")) continue;
    const style = getComputedStyle(e);
    const colour = shape ? style.stroke : svg ? style.fill : style.color;
    const [a, b] = [luminance(parse(colour).c), luminance(behind(e))];
    const what = `${e.tagName} ${e.textContent.trim().slice(0, 30)}`;
    out.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), shape ? 3 : 4.5, what]);
  }
  return out;
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read_in_both_schemes(browser: Any, league: League, job: str, scheme: str) -> None:
    sight = Sight(browser, url(league), color_scheme=scheme)
    expect(sight.page.locator("svg path.curve").first).to_be_attached()
    sight.page.get_by_text("The numbers, the last 50 rounds").click()
    found = sight.page.evaluate(RATIO, scheme)
    assert len(found) > 60 and any(least == 3 for _, least, _ in found)
    assert [one for one in found if one[0] < one[1]] == []
    dark = sight.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    assert dark == (scheme == "dark")
    sight.close()


def test_a_screen_reader_finds_its_way(sight: Sight, job: str) -> None:
    page = sight.page
    expect(page.locator("svg path.curve").first).to_be_attached()
    for role, name in (("banner", None), ("main", None), ("contentinfo", None), ("region", "Now"), ("region", "Curves"),
                       ("region", "Parties"), ("region", "Jobs"), ("region", "The log")):  # fmt: skip
        found = page.get_by_role(role, name=name, exact=True) if name else page.get_by_role(role)
        assert found.count() >= 1, (role, name)
    assert page.get_by_role("heading", level=1).count() == 1
    assert page.locator("h2").all_inner_texts() == ["Now", "Curves", "Parties", "Jobs", "The log"]
    for table in ("Parties", "Jobs"):
        assert page.get_by_role("region", name=table, exact=True).get_by_role("table").count() >= 1
    assert page.get_by_role("columnheader", name="Last seen").get_attribute("scope") == "col"
    assert page.locator("thead th:not([scope=col]), tbody th:not([scope=row])").count() == 0
    for picture in page.get_by_role("img").all():
        assert re.search(r"by round: .* is .* in round \d+", picture.get_attribute("aria-label") or "")
    assert page.get_by_role("progressbar", name=re.compile("Round .* closed")).count() == 1
    assert page.get_by_label("Admin token, to start and stop jobs").get_attribute("type") == "password"
    unnamed = "all => all.filter(e => !e.labels?.length && !e.textContent.trim()).length"
    assert page.locator("button, input, textarea").evaluate_all(unnamed) == 0
    live = page.locator("[aria-live]").evaluate_all("all => all.map(e => [e.id, e.getAttribute('aria-live')])")
    assert dict(live) == {"said": "polite", "answer": "polite"}, (
        "neither a curve nor a countdown is read out as it goes"
    )
    assert page.locator("html").get_attribute("lang") == "en"


def test_it_works_by_keyboard(sight: Sight, job: str) -> None:
    page = sight.page
    expect(page.get_by_role("button", name=f"Stop {job}")).to_be_visible()
    expect(page.locator("#numbers-box")).to_be_visible()
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the content")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        told = page.evaluate(
            "(e => [e.tagName, e.innerText || e.id, getComputedStyle(e).outlineStyle])(document.activeElement)"
        )
        reached.add(told[0])
        if told[0] != "BODY":
            assert told[2] != "none", f"nobody sees that {told} has the focus"
        else:
            break
    assert {"SUMMARY", "BUTTON", "INPUT"} <= reached


def test_it_fits_a_narrow_screen_and_moves_nothing_for_who_wants_that(browser: Any, league: League, job: str) -> None:
    sight = Sight(browser, url(league), viewport={"width": 360, "height": 740}, reduced_motion="reduce")
    expect(sight.page.locator("svg path.curve").first).to_be_attached()
    wide, screen = sight.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= screen == 360
    assert sight.page.evaluate("document.getAnimations().length") == 0
    sight.close()


# A simulation


@pytest.fixture
def simulated(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Start `hansa run --ui`; returns the process and the page's address."""
    started: list[subprocess.Popen[str]] = []

    def start(rounds: int, *more: str) -> tuple[subprocess.Popen[str], str]:
        (tmp_path / "digits.toml").write_text(digits(rounds=rounds, engine="reference"))
        command = [sys.executable, "-m", "hansa.cli", "run", "digits.toml", "--out", "seen", "--ui", *more]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        first = process.stdout.readline()
        found = re.fullmatch(r"live page: (http://127\.0\.0\.1:\d+/#token=[\w-]+)\n", first)
        assert found is not None, first
        return process, found[1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_simulation_is_shown_and_stopped_and_can_be_resumed(
    browser: Any, simulated: Callable[..., tuple[subprocess.Popen[str], str]], tmp_path: Path
) -> None:
    process, where = simulated(100_000)
    sight = Sight(browser, where)
    page = sight.page
    asked: list[str] = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
    curve = page.locator("figure", has_text="Loss").locator("path.curve").first
    sight.until(lambda: curve.count() > 0 and sight.number(curve) > 2)
    expect(page.locator("#log-section")).to_be_hidden()
    expect(page.locator("#token-form")).to_be_hidden()
    page.get_by_role("button", name="Stop seen").click()
    expect(page.locator("#now-status")).to_have_text("stopped")
    expect(page.locator("#now-reason")).to_have_text(re.compile("continue with: hansa resume"))
    expect(page.locator("#link-text")).to_have_text("the run has ended; this is how it ended")
    assert len(asked) == 1 and "with a checkpoint; hansa resume continues it" in asked[0]
    assert process.wait(timeout=PATIENT / 1000) == 130
    done = len((tmp_path / "seen" / "metrics.jsonl").read_text().splitlines())
    shown = page.locator("#now-round").inner_text()
    assert shown == f"Round {done:,} of 100,000 closed", "all of it was shown before the page ended"
    from hansa.artifacts.run_folder import RunFolder

    tree = RunFolder(tmp_path / "seen").restore()
    assert tree is not None and tree["progress"]["round"] == done, "no round has to be done again"
    sight.close("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING")


def test_drift_alarms_are_listed_with_their_rounds(
    browser: Any, simulated: Callable[..., tuple[subprocess.Popen[str], str]]
) -> None:
    settings = {"algorithm": "fedavg", "drift": "{name = 'rotation', start = 23, degrees = 180.0}", "task.model": "2nn",
                "task.party_test": "0.2", "run.detect": "page-hinkley",
                "algorithm.local": "{name = 'sgd', lr = 0.1, epochs = 2, batch = 10}"}  # fmt: skip
    _, where = simulated(25, "--stay", *(word for name, value in settings.items()
                                         for word in ("--set", f"{name}={value}")))  # fmt: skip
    sight = Sight(browser, where)
    expect(sight.page.locator("#alarms li").last).to_have_text(re.compile(r"Round 23: the loss of .* rose"))
    expect(sight.page.locator("#facts")).to_contain_text("Forgetting")
    sight.close("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING")


def test_a_simulation_shows_chosen_metrics_and_the_scores_of_each_party(
    browser: Any, simulated: Callable[..., tuple[subprocess.Popen[str], str]]
) -> None:
    chosen = ["--set", "task.party_test=0.2", "--set", "run.metrics=['f1', 'log-loss']"]
    process, where = simulated(3, "--stay", *chosen)
    sight = Sight(browser, where)
    page = sight.page
    expect(page.locator("#now-status")).to_have_text("finished")
    heads = page.locator("#parties thead th")
    expect(heads.nth(1)).to_have_text("Accuracy")
    texts = heads.all_inner_texts()
    assert texts == ["Party", "Accuracy", "Loss", "F1", "Log loss", "Missing", "Rejected", "Last reason"]
    scores = page.locator("#parties tbody tr").first.locator("td").all_inner_texts()
    assert page.locator("#parties tbody tr").count() == 4 and all(float(score) >= 0 for score in scores[:4])
    assert page.locator("figure", has_text="Chosen metrics").locator("path.curve").count() == 2
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=PATIENT / 1000) == 0
    sight.close("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING")


def test_the_page_stays_after_the_end_where_that_is_wanted_and_leads_to_the_report(
    browser: Any, simulated: Callable[..., tuple[subprocess.Popen[str], str]]
) -> None:
    process, where = simulated(3, "--stay")
    sight = Sight(browser, where)
    page = sight.page
    expect(page.locator("#now-status")).to_have_text("finished")
    expect(page.locator("#link")).to_have_attribute("data-state", "live")
    link = page.locator("#facts a")
    expect(link).to_have_attribute("href", "report")
    link.click()
    expect(page.locator("h1").first).to_be_visible()
    assert page.url.endswith("/report") and page.locator("img").count() > 0
    assert page.evaluate("origin") == "null", "it is kept apart from the page"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=PATIENT / 1000) == 0
    sight.close()


def test_before_it_is_connected_it_does_not_say_that_there_is_no_job(browser: Any, league: League) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(PATIENT)
    page.route("**/events*", lambda route: None)  # the answer never comes
    page.goto(url(league))
    page.wait_for_timeout(1500)
    expect(page.locator("#now-none")).to_have_text("Connecting …", timeout=PATIENT)
    assert "No job has been submitted" not in page.inner_text("main")
    context.close()
