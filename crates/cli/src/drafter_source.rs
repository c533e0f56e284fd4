//! A drafter to use: from a run folder, a checkpoint, or an exported or published drafter folder.
//!
//! Job: find it, check that it belongs to the target, read its weights. Refuses a drafter of a target of another shape; one of other weights of the same shape is
//! told and used, because decoding stays lossless and how well it transfers may be what is asked. Invariant: the weights are all of the program's tensors, by
//! internal name, as f32.

use crate::exit::{Exit, Failure};
use crate::launch::CONFIG_FILE;
use crate::target_folder::resolve;
use drafthorse_models::draft_config::{DraftConfig, TargetDims};
use drafthorse_models::draft_folder::DraftFolder;
use drafthorse_models::hf_config::TargetConfig;
use drafthorse_models::tensor_names::draft_sources;
use drafthorse_train::checkpoint::{Loaded, newest};
use drafthorse_train::config::RunConfig;
use drafthorse_train::frozen::TargetFiles;
use drafthorse_train::state::{TARGET_KEY, folder_weights, other_target, provenance};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A drafter with its weights.
pub struct DrafterSource {
    /// The folder it was read from.
    pub folder: PathBuf,
    /// Its shape.
    pub config: DraftConfig,
    /// (internal name, values).
    pub weights: Vec<(String, Vec<f32>)>,
    /// Step, build, dataset and target, as far as they are recorded.
    pub provenance: BTreeMap<String, String>,
    /// What to tell when it was trained for other weights than the target's.
    pub other_target: Option<String>,
    /// Things a person should know.
    pub notices: Vec<String>,
}

/// What lies at a path.
enum Place {
    Checkpoint(PathBuf),
    Folder(PathBuf),
}

fn place(path: &Path) -> Result<Place, Failure> {
    if let Some(checkpoint) = newest(path) {
        return Ok(Place::Checkpoint(checkpoint));
    }
    match [path.to_owned(), path.join("export")].into_iter().find(|p| p.join("config.json").is_file()) {
        Some(folder) => Ok(Place::Folder(folder)),
        None => {
            let variants = variants(path);
            let todo = match variants.as_slice() {
                [] => "name a run folder, a checkpoint (step-…), or a drafter folder with config.json and model.safetensors"
                    .to_owned(),
                names => format!("it is a sweep: name one of its variants, e.g. {}", path.join(&names[0]).display()),
            };
            Err(Failure::new(Exit::BadInput, format!("there is no drafter in {}", path.display()), todo))
        }
    }
}

/// Sub-folders of a sweep's run folder that hold checkpoints.
fn variants(path: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.filter(|e| newest(&e.path()).is_some()).filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// The target that the run of `path` was trained for, when `path` is part of a run folder.
pub fn recorded_target(path: &Path) -> Option<PathBuf> {
    path.ancestors().take(4).filter(|a| !a.as_os_str().is_empty()).map(|a| a.join(CONFIG_FILE)).find_map(|file| {
        let text = std::fs::read_to_string(&file).ok()?;
        RunConfig::parse(&text, &file.display().to_string(), &[]).ok().map(|c| c.target)
    })
}

/// The folder of the target: as asked for, or as the run recorded it.
///
/// # Errors
/// When neither says, or the folder is not there.
pub fn target_of(asked: Option<&Path>, drafter: &Path) -> Result<PathBuf, Failure> {
    match asked.map(Path::to_owned).or_else(|| recorded_target(drafter)) {
        Some(target) => resolve(&target),
        None => Err(Failure::new(Exit::Usage, format!("{} does not record its target", drafter.display()), "pass --target DIR")),
    }
}

impl DrafterSource {
    /// Opens the drafter at `path` for `target`.
    ///
    /// # Errors
    /// When there is none, it is damaged, or it belongs to another target.
    pub fn open(path: &Path, target: &TargetFiles) -> Result<DrafterSource, Failure> {
        let mut source = match place(path)? {
            Place::Checkpoint(folder) => from_checkpoint(folder, &target.config)?,
            Place::Folder(folder) => {
                let opened = DraftFolder::open(&folder, TargetDims::from(&target.config))?;
                let weights = folder_weights(&opened)?;
                let (config, provenance, notices) = (opened.config.clone(), opened.provenance().clone(), opened.warnings.clone());
                DrafterSource { folder, config, weights, provenance, other_target: None, notices }
            }
        };
        source.other_target = other_target(source.provenance.get(TARGET_KEY), target);
        Ok(source)
    }
}

fn from_checkpoint(folder: PathBuf, target: &TargetConfig) -> Result<DrafterSource, Failure> {
    let loaded = Loaded::open(&folder)?;
    let config: DraftConfig = serde_json::from_value(loaded.meta.drafter.clone()).map_err(|e| {
        let what = format!("{}: meta.json describes no drafter: {e}", folder.display());
        Failure::new(Exit::BadInput, what, "use the build that wrote it, or another checkpoint")
    })?;
    config.validate()?;
    config.check_target(TargetDims::from(target))?;
    let weights = draft_sources(&config)
        .iter()
        .map(|t| Ok((t.name.clone(), loaded.tensor(&t.name, t.elements())?)))
        .collect::<Result<_, Failure>>()?;
    let provenance = provenance(&loaded.meta);
    let mut notices = vec![format!("using {} (step {} of {})", folder.display(), loaded.meta.step, loaded.meta.total_steps)];
    notices.extend(loaded.notice());
    Ok(DrafterSource { folder, config, weights, provenance, other_target: None, notices })
}
