//! Where a command acts: on this machine, or at a destination.
//!
//! Job: the flags that name a destination, and running the same command there. Refuses to guess a destination: without a flag it is this machine. Invariant:
//! what is done at a destination is done by the program there, which prints what it would print here.

use crate::exit::{Exit, Failure};
use crate::screen::Screen;
use clap::Args;
use drafthorse_remote::destination::{DESTINATIONS_FILE, Destination, find, read_destinations};
use std::io::Write;
use std::path::PathBuf;

/// Flags that name a destination.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Destination (this machine, if none is named)")]
pub struct Place {
    /// A destination of the destinations file
    #[arg(long, value_name = "NAME", conflicts_with = "hop")]
    pub to: Option<String>,
    /// A hop towards a destination without a name, outermost first; may be repeated
    #[arg(long, value_name = "COMMAND", requires = "folder")]
    pub hop: Vec<String>,
    /// Folder of that destination
    #[arg(long, value_name = "DIR", conflicts_with = "to")]
    pub folder: Option<String>,
    /// Destinations file [default: destinations.toml here, else in ~/.config/drafthorse]
    #[arg(long, value_name = "FILE")]
    pub destinations: Option<PathBuf>,
}

impl Place {
    /// The destination, if one is named.
    ///
    /// # Errors
    /// When there is no such destination, or a hop cannot be read.
    pub fn destination(&self) -> Result<Option<Destination>, Failure> {
        if let Some(folder) = &self.folder {
            let made = Destination::from_hops(&self.hop, folder);
            let made =
                made.map_err(|what| Failure::new(Exit::Usage, format!("--hop: {what}"), "write e.g. --hop 'ssh root@host'"))?;
            return absolute(made).map(Some);
        }
        self.to.as_deref().map(|name| self.named(name)).transpose()
    }

    /// The destination called `name`.
    ///
    /// # Errors
    /// When there is none.
    pub fn named(&self, name: &str) -> Result<Destination, Failure> {
        let path = self.file();
        absolute(find(&read_destinations(&path)?, name, &path)?.clone())
    }

    /// The destination, which must be named.
    ///
    /// # Errors
    /// As [`Place::destination`], and when none is named.
    pub fn required(&self) -> Result<Destination, Failure> {
        self.destination()?.ok_or_else(|| {
            Failure::new(
                Exit::Usage,
                "no destination is named",
                "name one of the destinations file with --to, or give --hop and --folder",
            )
        })
    }

    fn file(&self) -> PathBuf {
        let own = self.destinations.clone();
        own.unwrap_or_else(|| {
            let here = PathBuf::from(DESTINATIONS_FILE);
            match std::env::var_os("HOME") {
                Some(home) if !here.exists() => PathBuf::from(home).join(".config/drafthorse").join(DESTINATIONS_FILE),
                _ => here,
            }
        })
    }

    /// These flags again, for messages that name the next command.
    pub fn words(&self) -> String {
        match (&self.to, &self.folder) {
            (Some(name), _) => format!(" --to {name}"),
            (None, Some(folder)) => {
                let hops: Vec<String> =
                    self.hop.iter().map(|h| format!(" --hop {}", drafthorse_remote::quote::quote(h))).collect();
                format!("{} --folder {folder}", hops.concat())
            }
            (None, None) => String::new(),
        }
    }
}

fn absolute(destination: Destination) -> Result<Destination, Failure> {
    if destination.folder.starts_with('/') {
        return Ok(destination);
    }
    let what = format!("the destination's folder `{}` is relative", destination.folder);
    Err(Failure::new(Exit::BadInput, what, "name it from the root, e.g. /root/drafthorse: hops begin in different places"))
}

/// Runs `argv` with the program there; its output is this program's output.
///
/// # Errors
/// When the chain does not lead there.
pub fn run_there(destination: &Destination, argv: &[String], screen: Screen) -> Result<Exit, Failure> {
    let mut all = vec![destination.program()];
    all.extend(screen.json.then(|| "--json".to_owned()));
    all.extend(screen.quiet.then(|| "--quiet".to_owned()));
    all.extend_from_slice(argv);
    let mut out = std::io::stdout().lock();
    let code = destination.far().pass_through(&destination.folder, &all, &mut out)?;
    out.flush().map_err(|e| Failure::output(&e))?;
    Exit::from_code(code).ok_or_else(|| {
        let what = format!("{} ended with code {code} on {}", destination.program(), destination.hops);
        Failure::new(Exit::Device, what, "see its words above; `drafthorse deploy` puts a fresh program there")
    })
}

/// The folder of runs there.
pub fn runs_there(destination: &Destination) -> String {
    format!("{}/runs", destination.folder)
}
