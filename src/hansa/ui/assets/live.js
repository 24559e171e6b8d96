// The live page: takes a snapshot and changes as server-sent events, and shows them. All text goes in as text, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
const ROUNDS = 1000, RECENT = 200, SILENT = 8, AGAIN = 2000;
const ACTIVE = ["waiting", "running", "stopping"];
const SCORES = [["accuracy", "accuracy"], ["auc", "AUC"], ["party_accuracy_worst_tenth", "worst tenth of parties"], ["r2", "R²"]];
const LOSSES = [["loss", "test"], ["train_loss", "training"], ["rmse", "RMSE"]];
const COLUMNS = [["round", "Round"], ["replies", "Replies"], ["asked", "Asked"], ["accuracy", "Accuracy"], ["loss", "Loss"],
  ["train_loss", "Training loss"], ["party_accuracy_mean", "Mean of parties"], ["party_accuracy_worst_tenth", "Worst tenth"],
  ["party_accuracy_spread", "Spread"], ["bytes_up", "Bytes from parties"], ["bytes_down", "Bytes to parties"], ["epsilon", "Epsilon"]];

let values = {}, rounds = {}, chosen = null, token = new URLSearchParams(location.hash.slice(1)).get("token") || "";
let source = null, last = "", heard = 0, offset = 0, connected = false, due = false, drawn = "", said = {}, spoke = -1e9;

// Helpers

const about = () => values.about || {};
const jobs = () => values.jobs || [];
const job = () => jobs().find((j) => j.job === chosen) || jobs()[0];
const now = () => Date.now() / 1000 + offset;
const number = (v) => v === null || v === undefined ? "–" : Number.isInteger(v) ? v.toLocaleString("en") : Math.abs(v) >= 1e4 || (v && Math.abs(v) < 1e-3) ? v.toExponential(2) : v.toFixed(4);
const short = (v) => Math.abs(v) >= 1e4 || (v && Math.abs(v) < 1e-3) ? v.toExponential(1) : String(+v.toPrecision(3));
const words = (name) => { const text = name.replaceAll("_", " "); return text === "auc" ? "AUC" : text[0].toUpperCase() + text.slice(1); };
const plural = (n, one, many) => `${number(n)} ${n === 1 ? one : many}`;

function bytes(n) {
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (n >= size) return `${(n / size).toPrecision(3)} ${unit}`;
  return `${n} B`;
}

function span(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 120) return `${s} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`;
}

function clock(at) {
  const date = new Date(at * 1000);
  const two = (n) => String(n).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function show(element, shown) {
  if (element.hidden === shown) element.hidden = !shown;
}

// Updates the children of a parent by key: creates new ones, keeps existing ones (with their focus), removes the others.
function keyed(parent, keys, make) {
  const there = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  keys.forEach((key, place) => {
    let child = there.get(key);
    there.delete(key);
    if (!child) { child = make(key); child.dataset.key = key; }
    if (parent.children[place] !== child) parent.insertBefore(child, parent.children[place] || null);
  });
  for (const child of there.values()) child.remove();
  return keys.map((key, place) => parent.children[place]);
}

function element(name, parent, set = {}) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(set)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

function facts(list, pairs) {
  const told = pairs.filter(([, value]) => value);
  const made = keyed(list, told.map(([name]) => name), () => {
    const box = document.createElement("div");
    element("dt", box); element("dd", box);
    return box;
  });
  told.forEach(([name, value, kind], place) => {
    const [dt, dd] = made[place].children;
    put(dt, name); put(dd, value);
    made[place].className = /whole/.test(kind) ? "whole" : "";
    dd.className = (kind || "").replace("whole", "").trim();
  });
}

// Updates the body of a table. A row is [key, [cell, ...]]; a cell is a text or [text, class]; the first cell is the row's header.
function fill(table, rows) {
  const made = keyed(table.tBodies[0], rows.map(([key]) => key), () => document.createElement("tr"));
  rows.forEach(([, cells], place) => {
    const row = made[place];
    cells.forEach((cell, at) => {
      const [text, kind] = Array.isArray(cell) ? cell : [cell, ""];
      const box = row.children[at] || (at ? element("td", row) : element("th", row, { scope: "row" }));
      put(box, text);
      if (box.className !== (kind || "")) box.className = kind || "";
    });
  });
  return made;
}

function head(table, names) {
  const row = table.tHead.rows[0] || element("tr", table.tHead);
  if (row.children.length !== names.length) row.replaceChildren(...names.map(() => element("th", null, { scope: "col" })));
  names.forEach((name, at) => { const [text, kind] = Array.isArray(name) ? name : [name, ""]; put(row.children[at], text); row.children[at].className = kind; });
}

// Drawing

function draw() {
  due = false;
  const a = about(), j = job();
  if (a.title) { put($("title"), a.title); document.title = `${a.title}: Hansa, live`; put($("foot"), `Hansa ${a.version}`); }
  const trouble = a.trouble || (a.starting ? "The aggregator is starting; jobs are not resumed yet." : a.closing ? "The aggregator is shutting down; jobs continue when it is back." : "");
  put($("trouble"), trouble);
  show($("trouble"), !!trouble);
  show($("now-none"), !j);
  put($("now-none"), values.jobs ? "No job has been submitted yet." : "Connecting …");
  show($("now"), !!j);
  if (j) drawNow(j);
  drawCurves(j);
  drawParties(j);
  drawJobs(j);
  drawLog();
  const simulated = a.kind === "simulation";
  show($("read-only"), !!a.kind && !a.stops && !simulated);
  show($("token-form"), !!a.stops && !token);
  show($("start-form"), !!a.starts && !!token);
  show($("log-section"), !simulated);
  put($("jobs-title"), simulated ? "The run" : "Jobs");
  tick();
}

function drawNow(j) {
  const n = values[`now:${j.job}`], lines = rounds[j.job] || [], line = lines[lines.length - 1], running = ACTIVE.includes(j.status);
  put($("now-job"), j.job);
  put($("now-status"), j.status);
  $("now-status").dataset.state = j.status;
  put($("now-reason"), j.reason);
  put($("now-round"), j.rounds ? `Round ${number(j.round)} of ${number(j.rounds)} closed` : `${plural(j.round, "round", "rounds")} closed`);
  $("now-bar").max = j.rounds || Math.max(1, j.round);
  $("now-bar").value = j.round;
  const known = (name) => { for (let k = lines.length - 1; k >= 0; k--) if (typeof lines[k][name] === "number") return lines[k][name]; return null; };
  const score = SCORES.find(([name]) => known(name) !== null), loss = LOSSES.find(([name]) => known(name) !== null);
  const phase = n && (n.round ? `round ${number(n.round)}: ${n.phase}` : n.phase);
  const counts = n && n.asked !== undefined && n.since && [`${number(n.answered)} of ${number(n.asked)} answered`, n.waiting ? `${number(n.waiting)} pending` : "", n.missing ? `${number(n.missing)} missing` : "", n.rejected ? `${number(n.rejected)} rejected` : "", n.refused ? `${number(n.refused)} refused` : ""].filter(Boolean).join(", ");
  facts($("facts"), [
    ["Phase", running && phase],
    ["Deadline of this exchange", running && n && n.until ? " " : running && n && n.since ? "none" : ""],
    ["Asked", running && counts],
    ["Last round", line && (line.empty ? `empty: ${line.empty}` : `${number(line.replies)} of ${number(line.asked)} replies in it`)],
    score && [score[1][0].toUpperCase() + score[1].slice(1), number(known(score[0]))],
    loss && [`Loss (${loss[1]})`, number(known(loss[0]))],
    ["Bytes from the parties", bytes(j.bytes_up)],
    ["Bytes to the parties", bytes(j.bytes_down)],
    ["Simulated time", known("simulated_seconds") ? span(known("simulated_seconds")) : ""],
    ["Privacy spent", known("epsilon") === null ? "" : `ε = ${number(known("epsilon"))}${known("delta") === null ? "" : ` at δ = ${number(known("delta"))}`}`],
    ["Forgetting", known("forgetting") === null ? "" : number(known("forgetting"))],
    ["Report", j.report || "", "whole"],
  ].filter(Boolean));
  const report = [...$("facts").children].find((box) => box.dataset.key === "Report");
  if (report && j.linked && !report.querySelector("a")) { const a = element("a", null, { href: "report" }); a.textContent = j.report; report.lastChild.replaceChildren(a); }
  const out = line ? ["missing", "rejected"].flatMap((how) => Object.entries(line[how] || {}).slice(0, 20).map(([party, why]) => `${party} ${how}: ${why}`)) : [];
  const rung = lines.filter((r) => r.alarms).slice(-5).reverse().map((r) => `Round ${number(r.round)}: the loss of ${r.alarms.slice(0, 20).join(", ")}${r.alarms.length > 20 ? " and others" : ""} rose`);
  keyed($("alarms"), rung, (text) => { const item = document.createElement("li"); item.textContent = text; return item; });
  show($("alarms-box"), rung.length > 0);
  keyed($("last"), out, (text) => { const item = document.createElement("li"); item.textContent = text; return item; });
  show($("last-box"), out.length > 0);
  if (line) put($("last-title"), `Not in round ${number(line.round)}`);
  say(j, phase);
}

// Announces changes to screen readers: states at once, phases at a limited rate.
function say(j, phase) {
  const at = performance.now();
  if (said.job === j.job && said.status !== undefined && said.status !== j.status) { put($("said"), `${j.job} is ${j.status}. ${j.reason}`); spoke = at; }
  else if (phase && phase !== said.phase && at - spoke > 15000) { put($("said"), `${j.job}, ${phase}`); spoke = at; }
  said = { job: j.job, status: j.status, phase };
}

function drawCurves(j) {
  const lines = j ? rounds[j.job] || [] : [], end = lines[lines.length - 1];
  const mark = j ? `${j.job} ${lines.length} ${end ? end.round : 0}` : "";
  if (mark === drawn) return;
  drawn = mark;
  const value = (l, name) => l[name] !== undefined ? l[name] : (l.chosen || {})[name];
  const chosenNames = [...new Set(lines.flatMap((l) => Object.keys(l.chosen || {})))];
  const series = (wanted) => wanted.map(([name, text]) => ({ name: text, points: lines.filter((l) => typeof value(l, name) === "number").map((l) => [l.round, value(l, name)]) })).filter((c) => c.points.length).slice(0, 3);
  const figures = [], share = series(SCORES), loss = series(LOSSES);
  if (share.length) figures.push(Curves.figure(share.length > 1 ? "Scores" : "Score", share.some((c) => c.name === "R²") ? "" : "share", share, short));
  if (loss.length) figures.push(Curves.figure("Loss", "", loss, short));
  const others = series(chosenNames.map((name) => [name, words(name)]));
  if (others.length) figures.push(Curves.figure("Chosen metrics", "", others, short));
  if (lines.length) {
    figures.push(Curves.figure("Bytes per round", "count", series([["bytes_up", "from parties"], ["bytes_down", "to parties"]]), bytes));
    figures.push(Curves.figure("Cohort", "count", series([["replies", "replies used"], ["asked", "asked"]]), short));
  }
  const privacy = series([["epsilon", "ε"]]);
  if (privacy.length) figures.push(Curves.figure("Privacy spent", "count", privacy, short));
  $("curves").replaceChildren(...figures);
  show($("curves-none"), !lines.length);
  show($("numbers-box"), lines.length > 0);
  const columns = [...COLUMNS.filter(([name]) => lines.some((l) => l[name] !== undefined)), ...chosenNames.map((name) => [name, words(name)])];
  head($("numbers"), columns.map(([, text], at) => [text, at ? "number" : ""]));
  $("numbers").tBodies[0].replaceChildren();
  fill($("numbers"), lines.slice(-50).reverse().map((l) => [String(l.round), columns.map(([name], at) => [number(value(l, name)), at ? "number" : ""])]));
}

function drawParties(j) {
  const rows = Object.keys(values).filter((name) => name.startsWith("party:")).map((name) => values[name]);
  const simulated = about().kind === "simulation", count = values.parties || { total: rows.length };
  const n = j && ACTIVE.includes(j.status) ? values[`now:${j.job}`] : null;
  const lost = simulated ? rows.filter((p) => p.missing || p.rejected).length : rows.length;
  const scores = simulated ? [...new Set(rows.flatMap((p) => Object.keys(p.scores || {})))] : [], measured = scores.length > 0;
  const named = lost < count.total ? `; ${lost} are shown` : "", own = measured ? " Scores: each party on its own test samples, in the last evaluation." : "";
  put($("parties-note"), simulated ? (count.total ? `${plural(count.total, "party was", "parties were")} missing or rejected in some round${named}.` : "No party was missing or rejected so far.") + own : `${plural(count.total, "party", "parties")}, ${number(count.here || 0)} connected${named}.`);
  head($("parties"), simulated ? ["Party", ...scores.map((name) => [words(name), "number"]), ["Missing", "number"], ["Rejected", "number"], "Last reason"] : ["Party", "Connection", "Last seen", "In this exchange", ["Rejected", "number"], "Last reason"]);
  rows.sort((a, b) => a.number - b.number);
  show($("parties").parentNode, rows.length > 0);
  fill($("parties"), rows.map((p) => [p.name, simulated ? [p.name, ...scores.map((name) => [number((p.scores || {})[name]), "number"]), [number(p.missing), "number"], [number(p.rejected), "number"], [p.reason, "why"]] : [
    p.name,
    [p.state !== "enrolled" ? p.state : p.here ? "connected" : "not connected", p.state === "revoked" ? "bad" : ""],
    ["", "when"],
    [(n && n.of && n.of[p.name]) || "–", "why"],
    [number(p.rejected), "number"],
    [p.reason || "–", "why"],
  ]]));
}

function drawJobs(j) {
  const made = fill($("jobs"), jobs().map((one) => [one.job, [one.job, one.status, [one.rounds ? `${number(one.round)} of ${number(one.rounds)}` : number(one.round), "number"], [one.submitted ? clock(one.submitted) : "–", "when"], [one.reason, "why"]]]));
  jobs().forEach((one, place) => {
    const row = made[place];
    const box = row.children[5] || element("td", row);
    const wanted = [...(jobs().length > 1 ? ["Show"] : []), ...(about().stops && ACTIVE.includes(one.status) ? ["Stop"] : [])];
    keyed(box, wanted, (what) => {
      const button = element("button", null, { type: "button", class: what === "Stop" ? "stop" : "plain", "aria-label": `${what} ${one.job}` });
      button.textContent = what;
      button.addEventListener("click", () => what === "Stop" ? stop(one.job) : choose(one.job));
      return button;
    });
    for (const button of box.children) if (button.dataset.key === "Stop") button.disabled = one.status === "stopping";
    if (j && one.job === j.job) row.setAttribute("aria-current", "true"); else row.removeAttribute("aria-current");
  });
}

function drawLog() {
  const log = values.log;
  if (!log) return;
  const behind = log.size - log.verified, h = log.head;
  const state = log.fault ? `DOES NOT VERIFY: ${log.fault}` : behind > 0 ? `being verified: ${number(log.verified)} of ${number(log.size)} entries so far` : `verifies: all ${number(log.size)} entries, their signatures and heads`;
  facts($("log"), [
    ["Entries", number(log.size)],
    ["Signed answers in them", `${plural(log.updates, "update", "updates")}, ${plural(log.evaluations, "evaluation", "evaluations")}, ${number(log.answers)} other; ${number(log.rejected)} rejected, ${number(log.refusals)} refused`],
    ["Last signed head", h ? `of ${plural(h.size, "entry", "entries")}, with round ${h.round} of ${h.job}` : "none yet: the first is signed as a round closes"],
    ["Signed", h ? clock(h.at) : ""],
    ["Verification", state, log.fault ? "bad" : behind > 0 ? "" : "good"],
    ["Root", h ? h.root : "", "whole"],
  ]);
}

// Updated by a timer: the time until the deadline, the time since the last contact, the state of the connection.
function tick() {
  const j = job(), n = j && values[`now:${j.job}`];
  for (const box of $("facts").children) {
    if (box.dataset.key === "Deadline of this exchange" && n && n.until) put(box.lastChild, n.until > now() ? `in ${span(n.until - now())}` : "now");
  }
  if (about().kind !== "simulation") for (const row of $("parties").tBodies[0].rows) {
    const party = values[`party:${row.dataset.key}`];
    if (party) put(row.children[2], party.seen ? `${span(now() - party.seen)} ago` : "never");
  }
  const quiet = heard ? (performance.now() - heard) / 1000 : 0, lost = !connected || quiet > SILENT;
  const link = $("link"), over = about().ended;
  const state = over ? "ended" : !lost ? "live" : heard ? "lost" : "connecting";
  link.dataset.state = state;
  put($("link-text"), { ended: "the run has ended; this is how it ended", live: "live", connecting: "connecting …", lost: `not connected; last heard ${span(quiet)} ago; trying again` }[state]);
}

function soon() {
  if (!due) { due = true; requestAnimationFrame(draw); }
}

// Events

function thinned(lines) {
  return lines.length <= ROUNDS ? lines : [...lines.slice(0, -RECENT).filter((_, k) => k % 2 === 0), ...lines.slice(-RECENT)];
}

function take(event, whole) {
  const data = JSON.parse(event.data);
  heard = performance.now();
  connected = true;
  offset = data.at - Date.now() / 1000;
  if (!data.values) return tick();
  if (whole) { values = {}; rounds = {}; drawn = ""; }
  last = event.lastEventId;
  for (const [name, value] of Object.entries(data.values)) if (value === null) delete values[name]; else values[name] = value;
  for (const [name, lines] of Object.entries(data.rounds)) if (lines === null) delete rounds[name]; else rounds[name] = thinned([...(rounds[name] || []), ...lines]);
  soon();
}

function connect() {
  source = new EventSource(`events?last=${encodeURIComponent(last)}`);
  source.addEventListener("snapshot", (event) => take(event, true));
  source.addEventListener("change", (event) => take(event, false));
  source.addEventListener("beat", (event) => take(event, false));
  source.addEventListener("error", () => {
    connected = false;
    source.close(); // EventSource reconnects by itself only after some errors
    if (!about().ended) setTimeout(connect, AGAIN * (0.5 + Math.random()));
    tick();
  });
}

// Actions

async function ask(path, body) {
  try {
    const got = await fetch(path, { method: "POST", headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" }, body: JSON.stringify(body) });
    const tree = await got.json();
    if (got.status === 401) { token = ""; soon(); }
    return got.ok ? tree : { error: tree.error || `the server answered with status ${got.status}` };
  } catch (error) {
    return { error: "the request failed" };
  }
}

function answer(text, bad) {
  put($("answer"), text);
  $("answer").className = bad ? "bad" : "";
}

function choose(name) {
  chosen = name;
  draw();
  $("main").focus();
  scrollTo(0, 0);
}

async function stop(name) {
  if (!token) { answer("Enter the admin token first.", true); $("token").focus(); return; }
  const after = about().kind === "simulation" ? "It ends after its current round, with a checkpoint; hansa resume continues it." : "It cannot go on afterwards: its checkpoint is deleted, and there will be no model. Its closed rounds stay in the record and the log. To train again, it must be submitted again.";
  if (!confirm(`Stop ${name}?\n\n${after}`)) return;
  const got = await ask("stop", { job: name });
  answer(got.error ? `${name} was not stopped: ${got.error}` : got.stopped ? `${name} is being stopped.` : `${name} had already ended.`, !!got.error);
}

$("token-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  const got = await ask("token", {});
  if (got.error) token = "";
  $("token").value = "";
  $("token").setAttribute("aria-invalid", String(!!got.error));
  answer(got.error ? `Refused: ${got.error}.` : "The token is valid: you can start and stop jobs.", !!got.error);
  draw();
  if (got.error) $("token").focus();
});

$("start-file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (!file) return;
  $("start-text").value = await file.text();
  if (!$("start-name").value) $("start-name").value = file.name.replace(/\.[^.]*$/, "").replace(/[^A-Za-z0-9.+_-]/g, "-");
});

$("start-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = event.target.querySelector("button");
  button.disabled = true;
  const got = await ask("start", { name: $("start-name").value, experiment: $("start-text").value });
  button.disabled = false;
  answer(got.error ? `The job was not started: ${got.error}` : `Started ${got.job}. ${got.notes.join(". ")}.`, !!got.error);
  if (!got.error) { chosen = got.job; event.target.reset(); }
});

setInterval(tick, 1000);
connect();
