//! `drafthorse`: trains, measures and exports DFlash drafters.
//!
//! Job: the command line. This crate is the only one that prints, reads the environment or exits. Refuses to compute: every command calls the libraries.
//! Invariants: the exit code is one of [`exit::Exit`]; an error is two lines on standard error; a panic says that it is a bug and exits 70.

mod build_id;
mod commands;
mod deployment;
mod device;
mod drafter_source;
mod estimate;
mod exit;
mod format;
mod launch;
mod place;
mod progress;
mod prompts;
mod run_folder;
mod screen;
mod signals;
mod slots_text;
mod speculation;
mod target_folder;
mod watch_condition;
mod watch_web;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use exit::{BUG_ADVICE, Exit, Failure};
use screen::{ColorChoice, Screen, tell};
use std::process::ExitCode;

/// Train the small drafter model that makes a large language model decode several tokens per step
///
/// The usual way: prepare chats, init a config, look at its plan, train, eval, export.
#[derive(Debug, Parser)]
#[command(name = "drafthorse", version = build_id::BUILD_ID, max_term_width = 110, propagate_version = false)]
struct Cli {
    /// Print results as JSON on standard output
    #[arg(long, global = true)]
    json: bool,
    /// No notices and no progress
    #[arg(long, short, global = true)]
    quiet: bool,
    /// When to use colour
    #[arg(long, global = true, value_enum, default_value_t = ColorChoice::Auto, value_name = "WHEN")]
    color: ColorChoice,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(commands::demo::Demo),
    Prepare(commands::prepare::Prepare),
    Inspect(commands::inspect::Inspect),
    Init(commands::init::Init),
    Plan(commands::plan::Plan),
    Train(Box<commands::train::Train>),
    Eval(commands::eval::Eval),
    Generate(commands::generate::Generate),
    Overfit(commands::overfit::Overfit),
    Export(commands::export::Export),
    Bench(commands::bench::Bench),
    Doctor(commands::doctor::Doctor),
    Deploy(Box<commands::deploy::Deploy>),
    Launch(Box<commands::launch::Launch>),
    Ps(commands::ps::Ps),
    Watch(Box<commands::watch::Watch>),
    Stop(commands::stop::Stop),
    Restart(Box<commands::restart::Restart>),
    Rollback(commands::rollback::Rollback),
    Report(commands::report::Report),
    Runs(commands::runs::Runs),
    Version(commands::version::Version),
    #[command(hide = true)]
    Supervise(commands::supervise::Supervise),
}

fn main() -> ExitCode {
    std::panic::set_hook(Box::new(|info| {
        let place = info.location().map_or_else(String::new, |l| format!(" at {}:{}", l.file(), l.line()));
        let text = info.payload_as_str().unwrap_or("a panic without words");
        tell(format!("error: {text}{place}\n  {BUG_ADVICE}"));
        if std::env::var_os("RUST_BACKTRACE").is_some_and(|v| v != "0") {
            tell(std::backtrace::Backtrace::force_capture());
        }
    }));
    let exit = std::panic::catch_unwind(run).unwrap_or(Exit::Bug);
    ExitCode::from(exit.code())
}

fn run() -> Exit {
    let matches = Cli::command().after_help(exit::exit_code_table()).try_get_matches();
    let cli = match matches.and_then(|m| Cli::from_arg_matches(&m)) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no errors; a closed pipe while they are printed is nobody's fault.
            let _ = error.print();
            return if error.use_stderr() { Exit::Usage } else { Exit::Done };
        }
    };
    let screen = Screen::new(cli.json, cli.quiet, cli.color);
    let ended = match &cli.command {
        Command::Demo(args) => commands::demo::run(args, screen),
        Command::Prepare(args) => commands::prepare::run(args, screen),
        Command::Inspect(args) => commands::inspect::run(args, screen),
        Command::Init(args) => commands::init::run(args, screen),
        Command::Plan(args) => commands::plan::run(args, screen),
        Command::Train(args) => commands::train::run(args, screen),
        Command::Eval(args) => commands::eval::run(args, screen),
        Command::Generate(args) => commands::generate::run(args, screen),
        Command::Overfit(args) => commands::overfit::run(args, screen),
        Command::Export(args) => commands::export::run(args, screen),
        Command::Bench(args) => commands::bench::run(args, screen),
        Command::Doctor(args) => commands::doctor::run(args, screen),
        Command::Deploy(args) => commands::deploy::run(args, screen),
        Command::Launch(args) => commands::launch::run(args, screen),
        Command::Ps(args) => commands::ps::run(args, screen),
        Command::Watch(args) => commands::watch::run(args, screen),
        Command::Stop(args) => commands::stop::run(args, screen),
        Command::Restart(args) => commands::restart::run(args, screen),
        Command::Rollback(args) => commands::rollback::run(args, screen),
        Command::Report(args) => commands::report::run(args, screen),
        Command::Runs(args) => commands::runs::run(args, screen),
        Command::Version(args) => commands::version::run(args, screen),
        Command::Supervise(args) => commands::supervise::run(args, screen),
    };
    ended.unwrap_or_else(|failure| report(&failure, screen))
}

/// Two lines on standard error, and the code.
fn report(failure: &Failure, screen: Screen) -> Exit {
    if let Some(lines) = failure.lines() {
        let red = anstyle::AnsiColor::Red.on_default().bold();
        let shown = match lines.strip_prefix("error:") {
            Some(rest) if screen.error_color => format!("{red}error:{red:#}{rest}"),
            _ => lines,
        };
        tell(shown);
    }
    failure.exit()
}
