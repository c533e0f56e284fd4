//! The terminal view of a run: one screen from a status and its history.
//!
//! Refuses: to change the run (leaving the view leaves the run alone) and to judge (the [`Watcher`] does).
//! Invariants: drawing is a pure function of the [`View`], so that a test can look at it; any size of terminal is drawn on.

use crate::error::TelemetryError;
use crate::event::Envelope;
use crate::follow::{Source, Update};
use crate::history::{History, Series};
use crate::recorder::unix_ms;
use crate::status::{StageState, Status};
use crate::verdict::{Expected, Limits, State, Verdict, Watcher, span};
use ratatui::Frame;
use ratatui::crossterm::event as input;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, BorderType, Chart, Dataset, GraphType, LineGauge, Paragraph, Wrap};
use std::time::{Duration, Instant};

const BUSY: Color = Color::Blue;
const WAIT: Color = Color::Yellow;
const BLOCKED: Color = Color::DarkGray;
const HELD_OUT: Color = Color::LightRed;
const TAU: Color = Color::Green;
/// How often the source is asked.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Everything that a screen shows.
#[derive(Debug, Clone, Default)]
pub struct View {
    /// Where it comes from.
    pub source: String,
    /// The last status seen.
    pub status: Option<Status>,
    /// The curves.
    pub history: History,
    /// The watcher's own verdict.
    pub verdict: Verdict,
    /// The run's clock as the watcher guesses it.
    pub now_t: u64,
    /// Why the source could not be read, if it could not.
    pub trouble: Option<String>,
}

impl View {
    /// Takes in what a source gave.
    pub fn apply(&mut self, update: Update) {
        if update.restarted {
            self.history = History::default();
        }
        update.events.iter().for_each(|envelope: &Envelope| self.history.apply(envelope));
        if update.status.is_some() {
            self.status = update.status;
        }
    }

    /// Judges what is known at `local_t`, Unix time in milliseconds by this machine's clock.
    pub fn judge(&mut self, watcher: &mut Watcher, local_t: u64) {
        if let Some(status) = &self.status {
            self.verdict = watcher.observe(status, local_t);
            self.now_t = watcher.run_clock(status.t, local_t);
        }
    }
}

/// Shows the run of `source` until the reader leaves (q, Esc or Ctrl-C), or, if `until_over`, until it ends. Gives the last
/// verdict. A source that fails is asked again.
///
/// # Errors
/// If the terminal cannot be drawn on.
pub fn run_terminal_view(
    source: &mut dyn Source,
    expected: Expected,
    limits: Limits,
    until_over: bool,
) -> Result<Verdict, TelemetryError> {
    let mut terminal = ratatui::try_init().map_err(|source| TelemetryError::Terminal { source })?;
    let mut view = View { source: source.name(), ..View::default() };
    let mut watcher = Watcher::new(expected, limits);
    let shown = show(&mut terminal, source, &mut view, &mut watcher, until_over);
    // The terminal must be given back whatever happened.
    let restored = ratatui::try_restore();
    shown.and(restored).map_err(|source| TelemetryError::Terminal { source })?;
    Ok(view.verdict)
}

fn show(
    terminal: &mut ratatui::DefaultTerminal,
    source: &mut dyn Source,
    view: &mut View,
    watcher: &mut Watcher,
    until_over: bool,
) -> std::io::Result<()> {
    let mut next_poll = Instant::now();
    loop {
        if Instant::now() >= next_poll {
            next_poll = Instant::now() + POLL_INTERVAL;
            match source.poll() {
                Ok(update) => {
                    view.trouble = None;
                    if update.more {
                        next_poll = Instant::now();
                    }
                    view.apply(update);
                }
                Err(error) => view.trouble = Some(error.to_string()),
            }
            view.judge(watcher, unix_ms());
            terminal.draw(|frame| render(frame, view))?;
            if until_over && view.verdict.state.is_over() {
                return Ok(());
            }
        }
        if input::poll(next_poll.saturating_duration_since(Instant::now()))? {
            match input::read()? {
                input::Event::Key(key) if key.kind == input::KeyEventKind::Press && leaves(&key) => return Ok(()),
                input::Event::Resize(..) => next_poll = Instant::now(),
                _ => {}
            }
        }
    }
}

fn leaves(key: &input::KeyEvent) -> bool {
    let control = key.modifiers.contains(input::KeyModifiers::CONTROL);
    matches!(key.code, input::KeyCode::Char('q') | input::KeyCode::Esc) || (control && key.code == input::KeyCode::Char('c'))
}

fn tone(state: &State) -> Color {
    match state {
        State::Healthy | State::Finished { .. } => Color::Green,
        State::Starting { .. } | State::Stopped { .. } => Color::Cyan,
        State::Starved { .. } => Color::Yellow,
        State::Stalled { .. } | State::Diverging { .. } | State::NotYourCode { .. } | State::Failed { .. } => Color::Red,
        State::Unknown => Color::Gray,
    }
}

/// Draws the view on the whole frame.
pub fn render(frame: &mut Frame<'_>, view: &View) {
    let area = frame.area();
    let Some(status) = &view.status else {
        let text = view.trouble.clone().unwrap_or_else(|| format!("waiting for the first status of {}", view.source));
        frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), area);
        return;
    };
    let stands = match &view.verdict.state {
        State::Stalled { stands, .. } => stands.len().min(8) as u16,
        _ => 0,
    };
    let verdict_rows = 3 + u16::from(!view.verdict.advice.is_empty()) + stands;
    let worker_rows = match status.gate_t {
        Some(_) => status.stages.len() + usize::from(!status.slots.is_empty() || !status.channels.is_empty()) + status.gpus.len(),
        None => status.phases.len(),
    };
    let [head, verdict, bar, body, workers, warnings, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(verdict_rows),
        Constraint::Length(1),
        Constraint::Min(0),
        Constraint::Length(if worker_rows == 0 { 0 } else { worker_rows.min(20) as u16 + 2 }),
        Constraint::Length(status.warnings.len().min(3) as u16),
        Constraint::Length(1),
    ])
    .areas(area);
    render_head(frame, head, view, status);
    render_verdict(frame, verdict, view);
    render_progress(frame, bar, view, status);
    let [left, middle, right] =
        Layout::horizontal([Constraint::Fill(5), Constraint::Fill(5), Constraint::Length(34)]).areas(body);
    render_chart(
        frame,
        left,
        "loss",
        &[("train", BUSY, &view.history.loss), ("held-out", HELD_OUT, &view.history.held_out_loss)],
    );
    let acceptance = [
        ("expected", BUSY, &view.history.expected_acceptance),
        ("held-out", HELD_OUT, &view.history.held_out_expected_acceptance),
        ("τ", TAU, &view.history.tau),
    ];
    render_chart(frame, middle, "acceptance length", &acceptance);
    render_figures(frame, right, view, status);
    render_workers(frame, workers, view, status);
    render_warnings(frame, warnings, status);
    let trouble = view.trouble.as_ref().map(|t| t.lines().next().unwrap_or_default().to_owned());
    let foot_text =
        trouble.map_or_else(|| Line::from(" q leaves; the run goes on".dark_gray()), |t| Line::from(format!(" {t}").red()));
    frame.render_widget(foot_text, foot);
}

fn render_head(frame: &mut Frame<'_>, area: Rect, view: &View, status: &Status) {
    let mut spans = vec![" drafthorse ".bold().reversed(), format!(" {}", status.run_id).bold()];
    if let Some(identity) = &status.identity {
        let words = format!("  {} on {}, pid {}, build {}", identity.backend, identity.host, identity.pid, identity.build_id);
        spans.push(words.dark_gray());
    }
    spans.push(format!("  {}", view.source).dark_gray());
    frame.render_widget(Line::from(spans), area);
}

fn render_verdict(frame: &mut Frame<'_>, area: Rect, view: &View) {
    let colour = tone(&view.verdict.state);
    let name = format!(" {} ", view.verdict.state.name().to_uppercase());
    let mut lines = vec![Line::from(view.verdict.headline.clone().bold())];
    if !view.verdict.advice.is_empty() {
        lines.push(Line::from(vec![Span::styled("→ ", colour), view.verdict.advice.clone().into()]));
    }
    if let State::Stalled { stands, .. } = &view.verdict.state {
        lines.extend(
            stands.iter().take(8).map(|stand| {
                Line::from(format!("  {} on {}: {} for {}", stand.worker, stand.device, stand.at, span(stand.for_ms)))
            }),
        );
    }
    let block = Block::bordered()
        .border_type(BorderType::Rounded)
        .border_style(colour)
        .title(Span::styled(name, Style::new().fg(colour).add_modifier(Modifier::BOLD | Modifier::REVERSED)));
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

fn render_progress(frame: &mut Frame<'_>, area: Rect, view: &View, status: &Status) {
    let step = status.step.as_ref().map_or(0, |step| step.step);
    let (share, label) = match (status.gate_t, status.total_steps) {
        (None, _) => {
            let done = status.phases.iter().filter(|state| state.phase.done).count();
            let n = status.phases.len();
            (done as f64 / n.max(1) as f64, format!(" start-up: {done} of {n} phases"))
        }
        (Some(_), Some(total)) if total > 0 => {
            let left = status.rates.remaining_s.filter(|_| !status.is_over());
            let left = left.map_or_else(String::new, |s| format!(", {} left", span((s * 1e3) as u64)));
            (step as f64 / total as f64, format!(" step {step} of {total}{left}"))
        }
        (Some(_), _) => (0.0, format!(" step {step}")),
    };
    let gauge = LineGauge::default().ratio(share.clamp(0.0, 1.0)).label(label).filled_style(tone(&view.verdict.state));
    frame.render_widget(gauge, area);
}

fn render_chart(frame: &mut Frame<'_>, area: Rect, title: &str, curves: &[(&str, Color, &Series)]) {
    let points = || curves.iter().flat_map(|(_, _, series)| series.points());
    // The latest values stand in the title, where no curve can hide them.
    let mut head = vec![format!(" {title} ").into()];
    for (name, colour, series) in curves {
        if let Some((_, last)) = series.points().last() {
            head.push(format!("● {name} {last:.3} ").fg(*colour));
        }
    }
    let block = Block::bordered().border_type(BorderType::Rounded).border_style(Color::DarkGray).title(Line::from(head));
    if area.height < 5 || area.width < 20 || points().next().is_none() {
        frame.render_widget(Paragraph::new("nothing measured yet".dark_gray()).block(block), area);
        return;
    }
    let fold = |pick: fn(&(f64, f64)) -> f64| {
        points().map(pick).fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
    };
    let (x0, x1) = fold(|point| point.0);
    let (y0, y1) = fold(|point| point.1);
    let pad = if y1 > y0 { (y1 - y0) * 0.05 } else { 0.5 };
    let datasets = curves
        .iter()
        .filter(|(_, _, series)| !series.points().is_empty())
        .map(|(_, colour, series)| {
            Dataset::default().marker(Marker::Braille).graph_type(GraphType::Line).style(*colour).data(series.points())
        })
        .collect();
    let grey = Style::new().fg(Color::DarkGray);
    let x = Axis::default().bounds([x0, x1.max(x0 + 1.0)]).labels([format!("{x0:.0}"), format!("{x1:.0}")]).style(grey);
    let y = Axis::default().bounds([y0 - pad, y1 + pad]).labels([format!("{y0:.2}"), format!("{y1:.2}")]).style(grey);
    frame.render_widget(Chart::new(datasets).block(block).x_axis(x).y_axis(y), area);
}

fn render_figures(frame: &mut Frame<'_>, area: Rect, view: &View, status: &Status) {
    let mut lines = Vec::new();
    let mut figure = |name: &str, value: String| {
        lines.push(Line::from(vec![format!("{name:<17}").dark_gray(), value.bold()]));
    };
    if let Some(step) = &status.step {
        figure("loss", format!("{:.4}", step.loss));
        figure("expected accept.", format!("{:.3}", step.expected_acceptance));
        if let Some(held_out) = &status.held_out {
            figure("held-out loss", format!("{:.4}", held_out.loss));
            if let Some(tau) = held_out.tau {
                figure("τ held-out", format!("{tau:.3}"));
            }
        }
        figure("tokens/s", format!("{:.0}", status.rates.tokens_per_s));
        if let Some(mfu) = step.mfu {
            figure("MFU", format!("{:.1} %", mfu * 100.0));
        }
        figure("step time", format!("{:.0} ms", status.rates.step_ms));
        figure("learning rate", format!("{:.3e}", step.lr));
        figure("gradient norm", format!("{:.3}", step.grad_norm));
    }
    figure("last progress", format!("{} ago", span(view.now_t.saturating_sub(status.last_progress_t))));
    if status.telemetry.dropped_events + status.telemetry.unwritten_events > 0 {
        figure("events lost", format!("{}", status.telemetry.dropped_events + status.telemetry.unwritten_events));
    }
    let accuracy =
        status.held_out.as_ref().map(|h| ("held-out", &h.accuracy)).or(status.step.as_ref().map(|s| ("train", &s.accuracy)));
    if let Some((name, accuracy)) = accuracy.filter(|(_, accuracy)| !accuracy.is_empty()) {
        const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        let bar = |&share: &f32| BARS[((share.clamp(0.0, 1.0) * 8.0) as usize).min(7)];
        lines.push(Line::from(format!("right per slot, {name}").dark_gray()));
        lines.push(Line::from(accuracy.iter().flat_map(|share| [bar(share), ' ']).collect::<String>().fg(BUSY)));
        let first = accuracy.first().copied().unwrap_or_default() * 100.0;
        let last = accuracy.last().copied().unwrap_or_default() * 100.0;
        lines.push(Line::from(format!("1: {first:.0} %   {}: {last:.0} %", accuracy.len()).dark_gray()));
    }
    let block = Block::bordered().border_type(BorderType::Rounded).border_style(Color::DarkGray);
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

fn stage_line(stage: &StageState, width: usize) -> Line<'static> {
    let cells = |share: f64| (share * width as f64).round() as usize;
    let busy = cells(stage.busy_share).min(width);
    let wait = cells(stage.wait_share).min(width - busy);
    let blocked = cells(stage.blocked_share).min(width - busy - wait);
    Line::from(vec![
        format!(" {:<13} {:<7} ", stage.worker, stage.device).into(),
        "█".repeat(busy).fg(BUSY),
        "▒".repeat(wait).fg(WAIT),
        "░".repeat(blocked).fg(BLOCKED),
        " ".repeat(width - busy - wait - blocked).into(),
        format!(" {:>3.0} % ", stage.busy_share * 100.0).bold(),
        stage.at.clone().dark_gray(),
    ])
}

fn render_workers(frame: &mut Frame<'_>, area: Rect, view: &View, status: &Status) {
    let mut lines: Vec<Line<'_>> = Vec::new();
    let mut title = Line::from(" start-up ");
    if status.gate_t.is_none() {
        lines.extend(status.phases.iter().map(|state| {
            let phase = &state.phase;
            let of = phase.total.map_or_else(String::new, |total| format!(" of {total}"));
            let mark = if phase.done { "✓".green() } else { "…".cyan() };
            let idle = view.now_t.saturating_sub(state.last_progress_t);
            let since = if phase.done { String::new() } else { format!(", last progress {} ago", span(idle)) };
            let words =
                format!(" {} · {} on {}: {}{of} {}{since}", phase.name, phase.worker, phase.device, phase.progress, phase.unit);
            Line::from(vec![" ".into(), mark, words.into()])
        }));
    } else {
        title = Line::from(vec![
            " pipeline: ".into(),
            "█ busy ".fg(BUSY),
            "▒ waits for input ".fg(WAIT),
            "░ held up by output ".fg(BLOCKED),
        ]);
        let width = usize::from(area.width).saturating_sub(62).clamp(8, 40);
        lines.extend(status.stages.iter().map(|stage| stage_line(stage, width)));
        let channels = status.channels.iter().map(|c| format!("{} {}/{}", c.name, c.depth, c.capacity));
        let slots =
            status.slots.iter().map(|s| format!("slots of {} {} filled, {} free of {}", s.worker, s.filled, s.free, s.total));
        let fills: Vec<String> = channels.chain(slots).collect();
        if !fills.is_empty() {
            lines.push(Line::from(format!(" {}", fills.join(" · ")).dark_gray()));
        }
        lines.extend(status.gpus.iter().map(|gpu| {
            Line::from(format!(
                " {:<13} {:>3.0} %  {:.1} of {:.1} GB  {:.0} W  {:.0} °C  {}",
                gpu.device,
                gpu.utilization_percent,
                gpu.memory_used_bytes as f64 / 1e9,
                gpu.memory_total_bytes as f64 / 1e9,
                gpu.power_w,
                gpu.temperature_c,
                gpu.name
            ))
        }));
    }
    let block = Block::bordered().border_type(BorderType::Rounded).border_style(Color::DarkGray).title(title);
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

fn render_warnings(frame: &mut Frame<'_>, area: Rect, status: &Status) {
    let lines: Vec<Line<'_>> = status
        .warnings
        .iter()
        .rev()
        .take(3)
        .map(|w| {
            let count = if w.count > 1 { format!(" ({} times)", w.count) } else { String::new() };
            Line::from(vec![format!(" {}{count}: ", w.code).yellow(), w.text.lines().next().unwrap_or_default().into()])
        })
        .collect();
    frame.render_widget(Paragraph::new(lines), area);
}
