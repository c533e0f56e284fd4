//! Which folder a launch writes into, and which checkpoints it goes on from.
//!
//! Job: names, `--resume auto`, `--resume PATH`. Refuses to write a new run over an old one. Invariant: the checkpoints of a sweep's variants are of one
//! step.

use crate::exit::{Exit, Failure};
use crate::launch::CONFIG_FILE;
use drafthorse_train::checkpoint;
use drafthorse_train::config::RunConfig;
use drafthorse_train::run::variant_dir;
use std::path::{Path, PathBuf};

/// A run folder, chosen.
#[derive(Debug, PartialEq, Eq)]
pub struct Chosen {
    /// The folder; it may not exist yet.
    pub dir: PathBuf,
    /// A checkpoint per variant, or none for a new run.
    pub resume: Vec<PathBuf>,
    /// The step that they were made after.
    pub step: Option<u64>,
}

/// Name of a run when the config gives none: the target's, and the time.
pub fn default_name(target: &Path, stamp: &str) -> String {
    let name = target.file_name().map_or_else(|| "run".into(), |n| n.to_string_lossy().into_owned());
    format!("{}-{stamp}", name.to_lowercase())
}

/// Chooses folder and checkpoints.
///
/// # Errors
/// When a new run would land in the folder of an old one, or there is nothing to resume from where `resume` points.
pub fn choose(config: &RunConfig, resume: Option<&str>, stamp: &str) -> Result<Chosen, Failure> {
    let named = config.out.join(config.name.clone().unwrap_or_else(|| default_name(&config.target, stamp)));
    match resume {
        None => {
            let fresh = Chosen { dir: named, resume: Vec::new(), step: None };
            match checkpoints(config, &fresh.dir)? {
                Some(_) => {
                    let what = format!("{} holds the checkpoints of an earlier run", fresh.dir.display());
                    Err(Failure::new(Exit::BadInput, what, "go on with --resume auto, or choose another name"))
                }
                None => Ok(fresh),
            }
        }
        Some("auto") => {
            let candidates = if config.name.is_some() { vec![named.clone()] } else { earlier_runs(config) };
            for dir in candidates {
                if let Some((step, resume)) = checkpoints(config, &dir)? {
                    return Ok(Chosen { dir, resume, step: Some(step) });
                }
            }
            Ok(Chosen { dir: named, resume: Vec::new(), step: None })
        }
        Some(path) => {
            let chosen = at(config, Path::new(path))?;
            match &config.name {
                Some(name) if !is_same(&chosen.dir, &named) => Err(Failure::new(
                    Exit::Usage,
                    format!("--resume goes on in {}, but name = \"{name}\" asks for {}", chosen.dir.display(), named.display()),
                    "leave one of the two out; a new run from that drafter starts with drafter.init_from = its export",
                )),
                _ => Ok(chosen),
            }
        }
    }
}

/// Whether two paths name one folder, however they are written.
fn is_same(a: &Path, b: &Path) -> bool {
    a == b || a.canonicalize().is_ok_and(|a| b.canonicalize().is_ok_and(|b| a == b))
}

fn at(config: &RunConfig, path: &Path) -> Result<Chosen, Failure> {
    let nothing = || {
        let todo = "name a run folder or a checkpoint folder (step-…), or use --resume auto";
        Failure::new(Exit::BadInput, format!("there is no checkpoint in {}", path.display()), todo)
    };
    if path.join("meta.json").is_file() {
        if !config.sweep.is_empty() {
            let what = format!("{} is the checkpoint of one variant; a sweep resumes all of them", path.display());
            return Err(Failure::new(Exit::Usage, what, "name the run folder"));
        }
        let step = step_of(path).ok_or_else(nothing)?;
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let dir = if parent.ends_with("checkpoints") { parent.parent().unwrap_or(Path::new(".")) } else { parent };
        return Ok(Chosen { dir: dir.to_owned(), resume: vec![path.to_owned()], step: Some(step) });
    }
    let (step, resume) = checkpoints(config, path)?.ok_or_else(nothing)?;
    Ok(Chosen { dir: path.to_owned(), resume, step: Some(step) })
}

/// The newest step of which every variant has a checkpoint in `dir`.
fn checkpoints(config: &RunConfig, dir: &Path) -> Result<Option<(u64, Vec<PathBuf>)>, Failure> {
    let variants = config.variants()?;
    let lists: Vec<Vec<(u64, PathBuf)>> = variants
        .iter()
        .map(|(name, _)| {
            let root = variant_dir(dir, name.as_deref());
            let here = checkpoint::list(&root);
            if here.is_empty() { checkpoint::list(&root.join("checkpoints")) } else { here }
        })
        .collect();
    let (first, rest) = lists.split_first().expect("a run has a variant");
    let find = |list: &[(u64, PathBuf)], step| list.iter().find(|(s, _)| *s == step).map(|(_, p)| p.clone());
    for (step, path) in first.iter().rev() {
        let others: Option<Vec<PathBuf>> = rest.iter().map(|list| find(list, *step)).collect();
        if let Some(others) = others {
            return Ok(Some((*step, std::iter::once(path.clone()).chain(others).collect())));
        }
    }
    Ok(None)
}

/// Run folders made with this very config, newest first by name of their last change.
fn earlier_runs(config: &RunConfig) -> Vec<PathBuf> {
    let unnamed = |c: RunConfig| RunConfig { name: None, ..c };
    let wanted = unnamed(config.clone());
    let mut found: Vec<(std::time::SystemTime, PathBuf)> = std::fs::read_dir(&config.out)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let file = entry.path().join(CONFIG_FILE);
            let text = std::fs::read_to_string(&file).ok()?;
            let stored = RunConfig::parse(&text, &file.display().to_string(), &[]).ok()?;
            (unnamed(stored) == wanted).then_some(())?;
            Some((entry.metadata().ok()?.modified().ok()?, entry.path()))
        })
        .collect();
    found.sort();
    found.into_iter().rev().map(|(_, path)| path).collect()
}

fn step_of(folder: &Path) -> Option<u64> {
    folder.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(out: &Path, extra: &str) -> RunConfig {
        RunConfig::parse(
            &format!("target = \"t/Tiny\"\ndata = \"d\"\nout = {:?}\n{extra}", out.display().to_string()),
            "test",
            &[],
        )
        .unwrap()
    }

    fn checkpoint_at(dir: &Path, step: u64) -> PathBuf {
        let folder = dir.join(checkpoint::folder_name(step));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("meta.json"), "{}").unwrap();
        folder
    }

    #[test]
    fn a_new_run_never_lands_in_an_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let named = config(dir.path(), "name = \"night\"\n");
        assert_eq!(choose(&named, None, "now").unwrap().dir, dir.path().join("night"));
        checkpoint_at(&dir.path().join("night"), 3);
        assert_eq!(choose(&named, None, "now").unwrap_err().exit(), Exit::BadInput);
        assert_eq!(choose(&config(dir.path(), ""), None, "now").unwrap().dir, dir.path().join("tiny-now"));
    }

    #[test]
    fn auto_goes_on_where_a_checkpoint_is_and_else_starts() {
        let dir = tempfile::tempdir().unwrap();
        let named = config(dir.path(), "name = \"night\"\n");
        assert_eq!(choose(&named, Some("auto"), "now").unwrap().step, None);
        checkpoint_at(&dir.path().join("night"), 3);
        let newest = checkpoint_at(&dir.path().join("night"), 12);
        let chosen = choose(&named, Some("auto"), "now").unwrap();
        assert_eq!((chosen.step, chosen.resume), (Some(12), vec![newest]));
        // Without a name, a folder counts only if it was made with this config.
        let unnamed = config(dir.path(), "");
        assert_eq!(choose(&unnamed, Some("auto"), "now").unwrap().step, None);
        std::fs::write(dir.path().join("night").join(CONFIG_FILE), named.to_toml()).unwrap();
        assert_eq!(choose(&unnamed, Some("auto"), "now").unwrap().step, Some(12));
        assert_eq!(choose(&config(dir.path(), "seed = 1\n"), Some("auto"), "now").unwrap().step, None);
    }

    #[test]
    fn a_path_is_a_run_folder_or_a_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("night");
        let old = checkpoint_at(&run, 3);
        checkpoint_at(&run, 12);
        let c = config(dir.path(), "");
        let text = |p: &Path| p.display().to_string();
        assert_eq!(choose(&c, Some(&text(&run)), "now").unwrap().step, Some(12));
        let chosen = choose(&c, Some(&text(&old)), "now").unwrap();
        assert_eq!((chosen.step, &chosen.dir), (Some(3), &run));
        // A name beside a path is fine as long as both mean one folder.
        let named = |name: &str| config(dir.path(), &format!("name = \"{name}\"\n"));
        assert_eq!(choose(&named("night"), Some(&text(&run)), "now").unwrap().step, Some(12));
        let refused = choose(&named("day"), Some(&text(&old)), "now").unwrap_err();
        let lines = refused.lines().unwrap();
        assert!(refused.exit() == Exit::Usage && lines.contains("night") && lines.contains("day"), "{lines}");
        let lines = choose(&c, Some(&text(dir.path())), "now").unwrap_err().lines().unwrap();
        assert!(lines.contains("there is no checkpoint"), "{lines}");
    }

    #[test]
    fn a_sweep_resumes_at_a_step_that_all_variants_have() {
        let dir = tempfile::tempdir().unwrap();
        let c =
            config(dir.path(), "name = \"s\"\n[pipeline]\ndrafters = [0, 1]\n[[sweep]]\nname = \"a\"\n[[sweep]]\nname = \"b\"\n");
        let run = dir.path().join("s");
        for (variant, steps) in [("a", vec![5, 10]), ("b", vec![5])] {
            for step in steps {
                checkpoint_at(&run.join(variant), step);
            }
        }
        let chosen = choose(&c, Some("auto"), "now").unwrap();
        assert_eq!((chosen.step, chosen.resume.len()), (Some(5), 2));
    }
}
