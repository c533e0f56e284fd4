//! Export: a trained drafter, written as servers load it, read back and compared bit for bit.
//!
//! Job: write a plain or speculators folder aside, open it as any reader would, compare config and every tensor with what was
//! asked for, and only then rename it into place. It refuses non-finite weights, missing or misshapen tensors, a folder that
//! exists (unless told to replace an earlier export), and a folder that holds something else even then.
//! Invariants: an interrupted export leaves the old folder as it was, or none; equal weights give equal bytes.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::draft_config::{DraftConfig, DraftError};
use crate::draft_folder::{DraftFolder, DraftFolderError};
use crate::draft_json::{self, ARCHITECTURE};
use crate::safetensors_file::write_bf16;
use crate::tensor_names::{draft_sources, plain_tensors};

pub use crate::draft_json::{Format, Verifier};
pub use crate::safetensors_file::Weights;

/// Why an export did not happen. The folder asked for is as it was before.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The drafter itself is wrong.
    #[error(transparent)]
    Draft(#[from] DraftError),
    /// A tensor that the drafter has was not handed over.
    #[error("tensor `{0}` was not handed to the export\nthis is a fault of the program; report it with the command line")]
    MissingTensor(String),
    /// A tensor that the drafter does not have was handed over.
    #[error("tensor `{0}` is no part of this drafter\ncheck that checkpoint and drafter config belong together")]
    UnknownTensor(String),
    /// A tensor of another size.
    #[error(
        "tensor `{tensor}` has {got} elements, the config asks for {wanted}\ncheck that checkpoint and drafter config belong together"
    )]
    Size {
        /// The program's name.
        tensor: String,
        /// Elements handed over.
        got: usize,
        /// Elements by the config.
        wanted: usize,
    },
    /// NaN, infinity, or a value beyond bf16.
    #[error("tensor `{tensor}` is {value} at element {at}\nexport an earlier checkpoint; this one has diverged")]
    NonFinite {
        /// The program's name.
        tensor: String,
        /// Flat index.
        at: usize,
        /// The value once rounded to bf16.
        value: f32,
    },
    /// The folder exists.
    #[error("{folder} exists\nchoose another folder, or ask to replace it", folder = folder.display())]
    Exists {
        /// The folder.
        folder: PathBuf,
    },
    /// The folder exists, was to be replaced, and is no drafter.
    #[error("{folder} holds something else than an exported drafter\nchoose another folder; it is not replaced", folder = folder.display())]
    NotADrafter {
        /// The folder.
        folder: PathBuf,
    },
    /// The file system refused.
    #[error("cannot {what} {path}: {source}\ncheck space and permissions", path = path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
    /// What was written does not open.
    #[error("the written folder does not read back: {0}")]
    Readback(Box<DraftFolderError>),
    /// What was written reads back as something else.
    #[error("the written folder differs from what was asked for: {detail}\ncheck the disk; nothing was put in place")]
    Differs {
        /// Where.
        detail: String,
    },
}

impl From<DraftFolderError> for ExportError {
    fn from(error: DraftFolderError) -> Self {
        Self::Readback(Box::new(error))
    }
}

/// What to export.
#[derive(Debug, Clone, Copy)]
pub struct ExportRequest<'a> {
    /// Where to; its parent must exist.
    pub folder: &'a Path,
    /// In which spelling.
    pub format: Format,
    /// Sizes.
    pub config: &'a DraftConfig,
    /// The program's tensors by name, as [`draft_sources`] lists them.
    pub weights: &'a BTreeMap<String, Weights<'a>>,
    /// The target, as a speculators config names it.
    pub verifier: &'a Verifier,
    /// Build id, config hash, step and the like, for the header of the safetensors file.
    pub provenance: &'a BTreeMap<String, String>,
    /// Whether an earlier export in `folder` is replaced.
    pub replace: bool,
}

/// What was exported and proven.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportReport {
    /// The folder, now in place.
    pub folder: PathBuf,
    /// Its spelling.
    pub format: Format,
    /// Tensors in model.safetensors.
    pub tensors: usize,
    /// Parameters in them.
    pub parameters: u64,
    /// Length of model.safetensors.
    pub file_bytes: u64,
    /// Bytes of weights that were read back and found equal: all of them.
    pub compared_bytes: u64,
}

/// Writes, reads back, compares, renames.
///
/// # Errors
/// An [`ExportError`]; the folder asked for is then as it was before.
pub fn export(request: &ExportRequest<'_>) -> Result<ExportReport, ExportError> {
    request.config.validate()?;
    check_weights(request)?;
    check_place(request)?;
    let aside = sibling(request.folder, "partial");
    fs::create_dir(&aside).map_err(io_error("create", &aside))?;
    let outcome = fill(request, &aside).and_then(|report| put_in_place(request, &aside).map(|()| report));
    if outcome.is_err() {
        // The failure to report is the first one; a leftover folder is only untidy, and its name says what it is.
        let _ = fs::remove_dir_all(&aside);
    }
    outcome
}

fn check_weights(request: &ExportRequest<'_>) -> Result<(), ExportError> {
    let sources = draft_sources(request.config);
    if let Some(name) = request.weights.keys().find(|name| sources.iter().all(|fused| fused.name != **name)) {
        return Err(ExportError::UnknownTensor(name.clone()));
    }
    for fused in sources {
        let values = request.weights.get(&fused.name).ok_or_else(|| ExportError::MissingTensor(fused.name.clone()))?;
        if values.len() != fused.elements() {
            return Err(ExportError::Size { got: values.len(), wanted: fused.elements(), tensor: fused.name });
        }
        let value = |i: usize| half::bf16::from_bits(values.bits(i)).to_f32();
        if let Some(at) = (0..values.len()).find(|i| !value(*i).is_finite()) {
            return Err(ExportError::NonFinite { tensor: fused.name, at, value: value(at) });
        }
    }
    Ok(())
}

fn check_place(request: &ExportRequest<'_>) -> Result<(), ExportError> {
    let folder = request.folder;
    let taken = match fs::read_dir(folder) {
        Ok(mut entries) => entries.next().is_some(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(source) => return Err(ExportError::Io { what: "read", path: folder.to_owned(), source }),
    };
    if !taken {
        return Ok(());
    }
    if !request.replace {
        return Err(ExportError::Exists { folder: folder.to_owned() });
    }
    let config: Option<Value> = fs::read(folder.join("config.json")).ok().and_then(|text| serde_json::from_slice(&text).ok());
    if config.is_none_or(|config| config["architectures"][0] != ARCHITECTURE) {
        return Err(ExportError::NotADrafter { folder: folder.to_owned() });
    }
    Ok(())
}

/// Writes both files into `aside` and proves them.
fn fill(request: &ExportRequest<'_>, aside: &Path) -> Result<ExportReport, ExportError> {
    let specs = plain_tensors(request.config);
    let tensors: Vec<(&str, &[usize], Weights<'_>)> = specs
        .iter()
        .map(|spec| {
            let columns: usize = spec.shape[1..].iter().product();
            let rows = &spec.source.rows;
            let whole = request.weights[&spec.source.tensor];
            (spec.name.as_str(), spec.shape.as_slice(), whole.slice(rows.start * columns..rows.end * columns))
        })
        .collect();
    // transformers refuses a file whose header does not say for which framework it was written.
    let mut metadata = request.provenance.clone();
    metadata.insert("format".to_owned(), "pt".to_owned());
    let weights_path = aside.join("model.safetensors");
    let file_bytes = write_bf16(&weights_path, &metadata, &tensors).map_err(io_error("write", &weights_path))?;

    let config_path = aside.join("config.json");
    let object = Value::Object(draft_json::write(request.config, request.format, request.verifier));
    let text = format!("{object:#}\n");
    File::create_new(&config_path)
        .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
        .map_err(io_error("write", &config_path))?;
    sync_folder(aside)?;

    let compared_bytes = prove(request, aside, &tensors)?;
    Ok(ExportReport {
        folder: request.folder.to_owned(),
        format: request.format,
        tensors: tensors.len(),
        parameters: tensors.iter().map(|(_, _, values)| values.len() as u64).sum(),
        file_bytes,
        compared_bytes,
    })
}

/// Opens the folder as any reader would and compares. Returns the bytes of weights compared.
fn prove(request: &ExportRequest<'_>, aside: &Path, tensors: &[(&str, &[usize], Weights<'_>)]) -> Result<u64, ExportError> {
    let differs = |detail: String| ExportError::Differs { detail };
    let folder = DraftFolder::open(aside, request.config.target_dims())?;
    if folder.format != request.format || folder.config != *request.config {
        return Err(differs(format!("config.json reads as {:?}, not as {:?}", folder.config, request.config)));
    }
    if let Some(warning) = folder.warnings.first() {
        return Err(differs(warning.clone()));
    }
    let mut compared_bytes = 0;
    for fused in folder.tensors() {
        let mut bits = vec![0u16; fused.elements()];
        folder.read_bf16(&fused, &mut bits).map_err(DraftFolderError::from)?;
        let wanted = request.weights[&fused.name];
        if let Some(at) = (0..bits.len()).find(|i| bits[*i] != wanted.bits(*i)) {
            return Err(differs(format!("tensor `{}` at element {at}", fused.name)));
        }
        compared_bytes += 2 * bits.len() as u64;
    }
    let written: u64 = tensors.iter().map(|(_, _, values)| 2 * values.len() as u64).sum();
    if compared_bytes != written {
        return Err(differs(format!("{compared_bytes} bytes of weights read back, {written} written")));
    }
    Ok(compared_bytes)
}

fn put_in_place(request: &ExportRequest<'_>, aside: &Path) -> Result<(), ExportError> {
    let folder = request.folder;
    let old = sibling(folder, "replaced");
    let replaces = request.replace && folder.exists();
    if replaces {
        fs::rename(folder, &old).map_err(io_error("move aside", folder))?;
    }
    if let Err(source) = fs::rename(aside, folder) {
        if replaces {
            fs::rename(&old, folder).map_err(io_error("move back", &old))?;
        }
        return Err(ExportError::Io { what: "rename the finished export to", path: folder.to_owned(), source });
    }
    if replaces {
        fs::remove_dir_all(&old).map_err(io_error("remove the replaced", &old))?;
    }
    sync_folder(parent(folder))
}

/// A neighbour of `folder`, so that a rename stays inside one file system.
fn sibling(folder: &Path, role: &str) -> PathBuf {
    let name = folder.file_name().unwrap_or_default().display();
    parent(folder).join(format!(".{name}.{role}-{}", std::process::id()))
}

fn parent(folder: &Path) -> &Path {
    folder.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Makes names durable: on Unix a rename survives a power cut only once its folder is synced.
fn sync_folder(folder: &Path) -> Result<(), ExportError> {
    File::open(folder).and_then(|file| file.sync_all()).map_err(io_error("sync", folder))
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ExportError {
    let path = path.to_owned();
    move |source| ExportError::Io { what, path, source }
}
