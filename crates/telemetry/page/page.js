// The page of a run: everything shown comes from one status object and the events before it.

const $ = id => document.getElementById(id);
const num = v => (v === undefined || v === null ? NaN : Number(v));
const el = (tag, className, ...children) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children.filter(c => c !== null && c !== undefined));
  return node;
};
const fixed = digits => v => (Number.isFinite(num(v)) ? num(v).toFixed(digits) : String(num(v)));
const percent = v => `${Math.round(num(v) * 100)} %`;
const count = v => Math.round(num(v)).toLocaleString("en");
const bytes = v => (v >= 1e9 ? `${(v / 1e9).toFixed(1)} GB` : v >= 1e6 ? `${(v / 1e6).toFixed(1)} MB` : `${(v / 1e3).toFixed(1)} kB`);
const span = ms => {
  const s = Math.floor(ms / 1000);
  if (s < 1) return "0 s";
  if (s < 120) return `${s} s`;
  if (s < 7200) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return s < 172800 ? `${Math.floor(s / 3600)} h ${Math.floor(s / 60) % 60} min` : `${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
};
const brief = ms => (ms < 120000 ? span(ms) : ms < 7200000 ? `${Math.floor(ms / 60000)} min` : `${Math.floor(ms / 3600000)} h`);
const ago = ms => (ms < 1000 ? "now" : `${span(ms)} ago`);
const time = t => new Date(t).toLocaleString("sv-SE");

const data = { loss: new Series(), heldLoss: new Series(), expected: new Series(), heldExpected: new Series(), tau: new Series(), rate: new Series() };
const charts = [
  new Chart($("chart-loss"), "Loss", [
    { name: "train", color: "--blue", data: data.loss, smooth: true, format: fixed(3) },
    { name: "held-out", color: "--orange", data: data.heldLoss, dots: true, format: fixed(3) },
  ]),
  new Chart($("chart-acceptance"), "Acceptance length", [
    { name: "expected, train", color: "--blue", data: data.expected, smooth: true, format: fixed(2) },
    { name: "expected, held-out", color: "--orange", data: data.heldExpected, dots: true, format: fixed(2) },
    { name: "τ measured", color: "--aqua", data: data.tau, dots: true, format: fixed(2) },
  ], { floor: 1 }),
  new Chart($("chart-rate"), "Throughput", [
    { name: "tokens/s", color: "--blue", data: data.rate, smooth: true, format: short },
  ], { floor: 0 }),
];
const gpuHistory = new Map();
let evaluations = [], files = [], status = null, lastSeq = 0, statusAt = 0, connected = false, frozen = false, dirty = true;

function forget() {
  for (const series of Object.values(data)) Object.assign(series, new Series());
  charts[0].bad = []; gpuHistory.clear(); evaluations = []; files = []; lastSeq = 0;
}

// Takes in one event. A launch that resumes takes back the steps after its checkpoint; one that does not starts over.
function take(event) {
  if (event.seq !== undefined) lastSeq = Math.max(lastSeq, event.seq);
  dirty = true;
  if (event.kind === "run") {
    const from = event.resumed_from_step || 0;
    for (const series of Object.values(data)) series.cutAfter(from);
    charts[0].bad = charts[0].bad.filter(step => step <= from);
    evaluations = evaluations.filter(e => e.step <= from); files = files.filter(f => f.step <= from);
    gpuHistory.clear();
  } else if (event.kind === "step") {
    data.loss.push(event.step, num(event.loss));
    data.expected.push(event.step, num(event.expected_acceptance));
    data.rate.push(event.step, num(event.tokens_per_s));
    if (event.skipped || !Number.isFinite(num(event.loss))) charts[0].bad.push(event.step);
  } else if (event.kind === "held_out") {
    data.heldLoss.push(event.step, num(event.loss));
    data.heldExpected.push(event.step, num(event.expected_acceptance));
    if (event.tau !== undefined) data.tau.push(event.step, num(event.tau));
    evaluations.push(event);
  } else if (event.kind === "checkpoint" || event.kind === "export") {
    files.push(event);
  } else if (event.kind === "gpu") {
    if (!gpuHistory.has(event.device)) gpuHistory.set(event.device, []);
    const history = gpuHistory.get(event.device);
    history.push(num(event.utilization_percent));
    if (history.length > 240) history.shift();
  }
}

const TONES = { healthy: ["good", "✓"], finished: ["good", "✓"], starting: ["calm", "…"], starved: ["warn", "!"], stopped: ["calm", "■"], stalled: ["bad", "!"], diverging: ["bad", "↗"], not_your_code: ["bad", "≠"], failed: ["bad", "×"], unknown: ["", "?"] };

// The run's clock, as far as this page can tell: the time of the last status plus what has passed here since.
const runNow = () => (frozen ? status.t : status.t + (Date.now() - statusAt));

function drawVerdict() {
  let verdict = status.verdict;
  const silent = runNow() - status.t, over = ["finished", "failed", "stopped"].includes(verdict.state);
  const limit = Math.max(30000, 10 * status.telemetry.status_interval_ms);
  if (!frozen && !over && silent > limit) {
    verdict = { state: "stalled", headline: `no sign of life for ${span(silent)}`, advice: "the run, its host or the way to it is gone; this page shows what it last knew and keeps trying", stands: [] };
  }
  const [tone, icon] = TONES[verdict.state] || TONES.unknown, box = $("verdict");
  box.dataset.state = verdict.state; box.dataset.tone = tone;
  $("verdict-icon").textContent = icon;
  setText("verdict-state", verdict.state.replaceAll("_", " "));
  setText("verdict-headline", verdict.headline);
  setText("verdict-advice", verdict.advice); $("verdict-advice").hidden = !verdict.advice;
  const stands = verdict.stands || [];
  $("stands").hidden = !stands.length;
  $("stands").replaceChildren(...stands.map(s => el("li", "", el("b", "", s.worker), ` on ${s.device}: ${s.at} `, el("em", "", `for ${span(s.for_ms)}`))));
  const step = status.step ? status.step.step : 0, starting = !status.gate_t;
  const share = starting ? startShare() : status.total_steps ? step / status.total_steps : null;
  $("progress-fill").style.width = `${(share === null ? 0 : Math.min(1, share) * 100).toFixed(2)}%`;
  $("progress").hidden = share === null;
  $("progress").setAttribute("aria-valuenow", share === null ? 0 : Math.round(share * 100));
  const left = status.rates.remaining_s;
  setText("progress-text", starting ? (status.phases.length ? `start-up, ${status.phases.filter(p => p.done).length} of ${status.phases.length} phases` : "") : share === null ? `step ${count(step)}` : `${(share * 100).toFixed(1)} % of ${count(status.total_steps)} steps`);
  setText("progress-left", !over && !starting && left && verdict.state !== "stalled" ? `${span(left * 1000)} left` : "");
}
function startShare() {
  if (!status.phases.length) return 0;
  const shares = status.phases.map(p => (p.done ? 1 : p.total ? Math.min(1, p.progress / p.total) : 0));
  return shares.reduce((a, b) => a + b, 0) / shares.length;
}
function setText(id, text) { const node = $(id); if (node.textContent !== text) node.textContent = text; }

// Every figure shows one number of the status: `value` is that number itself, kept beside its rounded form.
function figures() {
  const step = status.step || {}, held = status.held_out || {}, best = status.best_held_out || {};
  return [
    ["step", "Step", step.step, count, status.step ? `epoch ${status.step.epoch}` : ""],
    ["loss", "Loss", step.loss, fixed(3), held.loss === undefined ? "" : `held-out ${fixed(3)(held.loss)}`],
    ["expected_acceptance", "Acceptance", step.expected_acceptance, fixed(2), "tokens expected"],
    ["tau", "τ held-out", held.tau, fixed(2), best.tau === undefined ? "" : `best ${fixed(2)(best.tau)}`],
    ["tokens_per_s", "Tokens/s", status.totals.steps ? status.rates.tokens_per_s : undefined, short, status.plan && status.plan.predicted_tokens_per_s ? `planned ${short(status.plan.predicted_tokens_per_s)}` : ""],
    ["mfu", "MFU", step.mfu, percent, "of GEMM ceiling"],
    ["step_ms", "Step time", status.totals.steps ? status.rates.step_ms : undefined, v => (v < 1000 ? `${Math.round(v)} ms` : `${(v / 1000).toFixed(2)} s`), ""],
    ["lr", "Learning rate", step.lr, v => num(v).toExponential(2), step.grad_norm === undefined ? "" : `grad norm ${fixed(2)(step.grad_norm)}`],
    ["last_progress", "Last progress", status.last_progress_t || undefined, () => brief(Math.max(0, runNow() - status.last_progress_t)), "ago"],
  ].filter(f => f[2] !== undefined && f[2] !== null);
}
function drawTiles() {
  $("tiles").replaceChildren(...figures().map(([key, name, value, format, note]) => {
    const strong = el("strong", "", format(value));
    strong.id = `v-${key}`; strong.dataset.value = value;
    return el("div", "tile", el("span", "", name), strong, note ? el("small", "", note) : null);
  }));
}

function drawSlots() {
  const train = (status.step && status.step.accuracy) || [], held = (status.held_out && status.held_out.accuracy) || [];
  const n = Math.max(train.length, held.length);
  if (!n) return $("slot-bars").replaceChildren(el("p", "empty", "measured with the first step"));
  const legend = el("div", "legend"), bars = el("div", "slotbars"), nums = el("div", "slotnums");
  for (const [name, list, color] of [["train, last step", train, "--blue"], ["held-out", held, "--orange"]]) {
    if (!list.length) continue;
    const mark = el("i"); mark.style.background = `var(${color})`;
    legend.append(el("span", "", mark, name, el("b", "", `mean ${percent(list.reduce((a, b) => a + num(b), 0) / list.length)}`)));
  }
  const words = [];
  for (let k = 0; k < n; k++) {
    const group = el("div"), top = Math.max(num(train[k]) || 0, num(held[k]) || 0);
    for (const [list, color] of [[train, "--blue"], [held, "--orange"]]) {
      if (!list.length) continue;
      const bar = el("i");
      bar.style.cssText = `height:${(num(list[k]) || 0) * 92}%;background:var(${color})`;
      group.append(bar);
    }
    const label = el("em", "", String(Math.round(top * 100)));
    label.style.bottom = `${top * 92}%`;
    group.append(label);
    group.title = `slot ${k + 1}: train ${percent(train[k])}${held.length ? `, held-out ${percent(held[k])}` : ""}`;
    words.push(group.title);
    bars.append(group); nums.append(el("span", "", String(k + 1)));
  }
  bars.setAttribute("role", "img"); bars.setAttribute("aria-label", words.join("; "));
  $("slot-bars").replaceChildren(legend, bars, nums);
}

function node(stage) {
  const stack = el("div", "stack");
  for (const [kind, share] of [["busy", stage.busy_share], ["wait", stage.wait_share], ["blocked", stage.blocked_share]]) {
    if (share <= 0.004) continue;
    const part = el("i", kind); part.style.width = `${share * 100}%`; stack.append(part);
  }
  const words = `busy ${percent(stage.busy_share)}, waits for input ${percent(stage.wait_share)}, held up by output ${percent(stage.blocked_share)}`;
  stack.setAttribute("role", "img"); stack.setAttribute("aria-label", words);
  const busy = el("span", "", `${stage.device} · ${percent(stage.busy_share)}`), at = el("div", "at", stage.at);
  busy.dataset.worker = stage.worker; busy.dataset.value = stage.busy_share; at.title = stage.at;
  const box = el("div", "node", el("div", "top", el("b", "", stage.worker), busy), stack, at);
  box.title = words;
  return box;
}
function fill(name, full, used, total, words) {
  const cells = el("div", "cells");
  if (total <= 24) {
    for (let i = 0; i < total; i++) cells.append(el("i", i < full ? "full" : i < full + used ? "used" : ""));
  } else {
    const bar = el("i", "full"); bar.style.flex = `0 0 ${(full / total) * 100}%`; cells.append(bar, el("i"));
  }
  const box = el("div", "fill", el("div", "top", name, el("b", "", `${full}/${total}`)), cells);
  box.title = words; box.setAttribute("role", "img"); box.setAttribute("aria-label", words);
  return box;
}
function drawPipeline() {
  if (!status.stages.length) return $("pipeline").replaceChildren(el("p", "empty", "the stages report once training has begun"));
  const column = (kind, one, many) => {
    const stages = status.stages.filter(s => s.stage === kind);
    return el("div", "stagecol", el("h3", "", stages.length > 1 ? many : one), ...stages.map(node));
  };
  const channel = c => fill(c.name, c.depth, 0, c.capacity, `${c.name}: ${c.depth} of ${c.capacity}`);
  const slot = s => fill(`slots, ${s.worker}`, s.filled, Math.max(0, s.total - s.filled - s.free), s.total, `slots of ${s.worker}: ${s.filled} filled, ${s.free} free, ${s.total - s.filled - s.free} being written or read`);
  $("pipeline").replaceChildren(
    column("prefetcher", "Prefetcher", "Prefetchers"), el("div", "flow", ...status.channels.slice(0, 1).map(channel)),
    column("target", "Target", "Targets"), el("div", "flow", ...status.channels.slice(1).map(channel), ...status.slots.map(slot)),
    column("drafter", "Drafter", "Drafters"));
}

function spark(history) {
  const box = svg("svg", { viewBox: "0 0 240 30", preserveAspectRatio: "none", "aria-hidden": "true" });
  const y = v => 29 - (Math.max(0, Math.min(100, v)) / 100) * 28, step = 240 / Math.max(1, history.length - 1);
  const d = history.map((v, i) => `${i ? "L" : "M"}${(i * step).toFixed(1)} ${y(v).toFixed(1)}`).join("");
  svg("path", { class: "area", d: `${d}L240 30L0 30Z` }, box);
  svg("path", { d, "vector-effect": "non-scaling-stroke" }, box);
  return box;
}
function drawGpus() {
  const planned = new Map(((status.plan && status.plan.devices) || []).map(d => [d.device, d]));
  $("card-gpus").hidden = !status.gpus.length && !planned.size;
  const meter = (name, text, share, mark, key, value) => {
    const bar = el("div", "bar", el("i")), words = el("span", "", text);
    bar.firstChild.style.width = `${Math.min(1, share) * 100}%`;
    if (mark !== null) { const line = el("u"); line.style.left = `${Math.min(1, mark) * 100}%`; line.title = "planned"; bar.append(line); }
    words.dataset.key = key; words.dataset.value = value;
    return el("div", "metric", el("div", "words", el("span", "", name), words), bar);
  };
  const rows = status.gpus.map(g => {
    const plan = planned.get(g.device), total = g.memory_total_bytes || 1;
    planned.delete(g.device);
    return el("div", "gpu", el("div", "", el("b", "", g.device), el("span", "name", g.name)),
      meter("utilisation", `${Math.round(g.utilization_percent)} %`, g.utilization_percent / 100, null, `${g.device} utilization`, g.utilization_percent),
      spark(gpuHistory.get(g.device) || []),
      meter(plan ? `memory, ${bytes(plan.planned_bytes)} planned` : "memory", `${bytes(g.memory_used_bytes)} of ${bytes(total)}`, g.memory_used_bytes / total, plan ? plan.planned_bytes / total : null, `${g.device} memory`, g.memory_used_bytes),
      el("div", "end", `${Math.round(g.power_w)} W · ${Math.round(g.temperature_c)} °C`));
  });
  for (const plan of planned.values()) {
    const parts = (plan.parts || []).map(p => `${p.name} ${bytes(p.size_bytes)}`).join(" · ");
    rows.push(el("div", "gpu", el("div", "", el("b", "", plan.device)), el("div", "metric", `planned ${bytes(plan.planned_bytes)}${plan.capacity_bytes ? ` of ${bytes(plan.capacity_bytes)}` : ""}`), el("div", "metric", parts)));
  }
  $("gpus").replaceChildren(...rows);
}

function table(heads, rows) {
  const head = el("tr", "", ...heads.map(([text, className]) => { const th = el("th", className, text); th.scope = "col"; return th; }));
  return el("table", "", el("thead", "", head), el("tbody", "", ...rows));
}
function drawPhases() {
  $("card-phases").hidden = !status.phases.length || (status.gate_t && status.phases.every(p => p.done) && !frozen);
  $("phases").replaceChildren(table([["Phase"], ["Worker"], ["Device"], ["Progress"], ["", "num"], ["Time", "num"]], status.phases.map(p => {
    const share = p.done ? 1 : p.total ? Math.min(1, p.progress / p.total) : 0, bar = el("div", "bar", el("i"));
    bar.firstChild.style.width = `${share * 100}%`;
    const amount = p.unit === "bytes" ? `${bytes(p.progress)}${p.total ? ` of ${bytes(p.total)}` : ""}` : `${count(p.progress)}${p.total ? ` of ${count(p.total)}` : ""} ${p.unit}`;
    const took = (p.done ? p.last_progress_t : runNow()) - p.started_t;
    return el("tr", "", el("td", "", p.name), el("td", "", p.worker), el("td", "dim", p.device), el("td", "bar-cell", bar), el("td", "num dim", p.done ? `✓ ${amount}` : amount), el("td", "num dim", took < 1000 ? `${took} ms` : span(took)));
  })));
}
function drawWarnings() {
  setText("warning-count", status.totals.warnings ? `${count(status.totals.warnings)} in all` : "");
  const lost = status.telemetry.dropped_events + status.telemetry.unwritten_events;
  const rows = [...status.warnings].reverse().map(w => el("div", "warning", el("code", "", w.code), el("em", "", w.count > 1 ? `${count(w.count)} times` : ""), el("em", "", ago(Math.max(0, runNow() - w.last_t))), el("p", "", w.text)));
  if (lost) rows.push(el("p", "empty", `${count(lost)} telemetry events were lost; no step was`));
  $("warnings").replaceChildren(...(rows.length ? rows : [el("p", "empty", "none")]));
}
function drawFiles() {
  const rows = evaluations.map(e => [e.step, "evaluation", `loss ${fixed(3)(e.loss)}, expected ${fixed(2)(e.expected_acceptance)}${e.tau === undefined ? "" : `, τ ${fixed(2)(e.tau)}`}`, e.elapsed_s])
    .concat(files.map(f => [f.step, f.kind === "export" ? `export, ${f.format}` : `checkpoint, ${f.role}`, `${f.path} (${bytes(f.size_bytes)})`, f.elapsed_s]))
    .sort((a, b) => b[0] - a[0]).slice(0, 8)
    .map(([step, what, text, s]) => el("tr", "", el("td", "num", count(step)), el("td", "", what), el("td", "path dim", text), el("td", "num dim", `${num(s).toFixed(1)} s`)));
  $("files").replaceChildren(rows.length ? table([["Step", "num"], ["What"], [""], ["Took", "num"]], rows) : el("p", "empty", "none yet"));
}
function drawIdentity() {
  const id = status.identity;
  if (!id) return;
  setText("run-id", status.run_id);
  setText("run-where", `${id.backend} on ${id.host}, pid ${id.pid}`);
  document.title = `${status.step ? `${count(status.step.step)} · ` : ""}${status.verdict.state.replaceAll("_", " ")} · ${status.run_id}`;
  const rows = [["Build", id.build_id], ["Config", id.config_hash], ["Dataset", id.dataset_hash], ["Started", time(id.started_t)], ["Host", `${id.host}, pid ${id.pid}`], ["Backend", id.backend]];
  if (id.resumed_from_step !== undefined) rows.push(["Resumed after step", count(id.resumed_from_step)]);
  $("identity").replaceChildren(...rows.map(([k, v]) => el("div", "", el("dt", "", k), el("dd", "", v))), el("div", "all", el("dt", "", "Command"), el("dd", "", id.command_line.join(" "))));
}

function draw() {
  if (!status) return;
  // Before the gate there is nothing to plot; the start-up table has the room.
  $("grid").classList.toggle("before", !status.gate_t);
  for (const part of [drawVerdict, drawTiles, drawSlots, drawPipeline, drawGpus, drawPhases, drawWarnings, drawFiles, drawIdentity]) part();
  setText("footer-text", `status of ${time(status.t)}, event ${count(status.seq)}`);
  if (dirty) { dirty = false; for (const chart of charts) chart.draw(); }
}
let drawing = false;
function soon() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => { drawing = false; draw(); });
}
function show(next) { status = next; statusAt = Date.now(); soon(); }

function link(state, text) { $("link").dataset.link = state; setText("link-text", text); }

// Follows the run. The browser comes back by itself after a break and names the last event it has; where it gives up
// (the server refused), this does the same after a pause that grows.
let pause = 1000;
function connect() {
  const token = new URLSearchParams(location.search).get("token") || "";
  const source = new EventSource(`events?points=4000&after=${lastSeq}&token=${encodeURIComponent(token)}`);
  source.onopen = () => { connected = true; pause = 1000; link("live", "live"); };
  source.onmessage = e => { take(JSON.parse(e.data)); soon(); };
  source.addEventListener("status", e => show(JSON.parse(e.data)));
  source.addEventListener("restarted", forget);
  source.onerror = () => {
    connected = false;
    const over = status && ["finished", "failed", "stopped"].includes(status.verdict.state);
    link(over ? "over" : "lost", over ? "the run has ended" : "reconnecting");
    if (source.readyState === EventSource.CLOSED) { setTimeout(connect, pause); pause = Math.min(30000, pause * 2); }
  };
}

const THEMES = ["", "light", "dark"], THEME_NAMES = { "": "Auto", light: "Light", dark: "Dark" };
let theme = "";
function setTheme(next) {
  theme = next;
  if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme;
  setText("theme-text", THEME_NAMES[theme]);
  $("theme").setAttribute("aria-label", `Colour theme: ${theme || "system"}`);
  // A page opened from a file may have no storage; the choice then lasts as long as the page.
  try { localStorage.setItem("drafthorse-theme", theme); } catch { theme = next; }
}
try { setTheme(localStorage.getItem("drafthorse-theme") || ""); } catch { setTheme(""); }
const asked = new URLSearchParams(location.search).get("theme");
if (THEMES.includes(asked)) setTheme(asked);
$("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]));
document.addEventListener("keydown", e => { if ((e.key === "t" || e.key === "T") && !e.ctrlKey && !e.metaKey && !e.altKey) $("theme").click(); });

const dump = $("dump") && JSON.parse($("dump").textContent);
if (dump && dump.events) {
  frozen = true;
  dump.events.forEach(take);
  link("frozen", "report");
} else {
  connect();
  setInterval(() => { if (status) { drawVerdict(); drawTiles(); } }, 1000);
}
if (dump) { show(dump.status); draw(); }
