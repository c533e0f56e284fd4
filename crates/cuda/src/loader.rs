//! Finds the driver and cuBLASLt at run time, and says how to get what is missing.
//!
//! Job: look where these libraries usually lie, the `nvidia/*/lib` folders of Python environments included, and load them so that the bindings find
//! them under their plain names. Refuses to read the environment: [`SearchPaths`] is what the caller read. Invariant: the bindings panic on a missing
//! library, so nothing in this crate calls them before [`Libraries::load`] has succeeded.
#![allow(unsafe_code)]

use crate::error::CudaError;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Folders to search before the system's own.
#[derive(Clone, Debug, Default)]
pub struct SearchPaths {
    /// In the order they are tried.
    pub folders: Vec<PathBuf>,
}

/// A library that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its file name.
    pub library: &'static str,
    /// Where; `None` when the system's loader found it by name.
    pub path: Option<PathBuf>,
}

impl SearchPaths {
    /// The usual folders, given the value of environment variables: CUDA_HOME, then the wheels of the active Python environment, of the interpreters on
    /// PATH and of the user, then /usr/local/cuda.
    pub fn usual(env: impl Fn(&str) -> Option<OsString>) -> SearchPaths {
        let mut folders = Vec::new();
        if let Some(home) = env("CUDA_HOME") {
            folders.push(Path::new(&home).join("lib64"));
            folders.push(Path::new(&home).join("lib"));
        }
        let mut prefixes: Vec<PathBuf> =
            ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(&env).map(PathBuf::from).collect();
        for folder in std::env::split_paths(&env("PATH").unwrap_or_default()) {
            if folder.join("python3").exists() {
                prefixes.extend(folder.parent().map(Path::to_path_buf));
            }
        }
        prefixes.extend(env("HOME").map(|h| Path::new(&h).join(".local")));
        prefixes.extend(["/usr/local".into(), "/usr".into()]);
        for prefix in prefixes {
            folders.extend(wheel_folders(&prefix));
        }
        folders.push("/usr/local/cuda/lib64".into());
        folders.dedup();
        SearchPaths { folders }
    }
}

/// `lib/python3*/{site,dist}-packages/nvidia/*/lib` under `prefix`.
fn wheel_folders(prefix: &Path) -> Vec<PathBuf> {
    let list = |p: &Path| -> Vec<PathBuf> { std::fs::read_dir(p).into_iter().flatten().flatten().map(|e| e.path()).collect() };
    let mut folders = Vec::new();
    for python in list(&prefix.join("lib")) {
        if !python.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3")) {
            continue;
        }
        for packages in ["site-packages", "dist-packages"] {
            let mut found: Vec<PathBuf> =
                list(&python.join(packages).join("nvidia")).into_iter().map(|p| p.join("lib")).filter(|p| p.is_dir()).collect();
            // `cu13`, where the wheels of this release lie, sorts before the folders of single libraries of older releases.
            found.sort();
            folders.extend(found);
        }
    }
    folders
}

/// Proof that the driver and cuBLASLt are loaded.
#[derive(Clone, Debug)]
pub struct Libraries {
    /// What was found where.
    pub found: Vec<Found>,
}

impl Libraries {
    /// Loads the driver and cuBLASLt; the first call decides, later calls return its result.
    ///
    /// # Errors
    /// [`CudaError::Missing`], naming the library, where it was looked for and how to get it.
    pub fn load(paths: &SearchPaths) -> Result<Libraries, CudaError> {
        static LOADED: OnceLock<Libraries> = OnceLock::new();
        if let Some(libraries) = LOADED.get() {
            return Ok(libraries.clone());
        }
        // SAFETY: looks for libcuda by name and opens it; the driver's initialisers are made to run in any process.
        if !unsafe { cudarc::driver::sys::is_culib_present() } {
            return Err(CudaError::Missing {
                what: "the NVIDIA driver's library libcuda.so.1 was not found".into(),
                todo: "install the NVIDIA driver (580 or newer); in a container, start it with access to the GPUs".into(),
            });
        }
        let mut found = vec![Found { library: "libcuda.so.1", path: None }];
        found.push(blas(paths)?);
        Ok(LOADED.get_or_init(|| Libraries { found }).clone())
    }
}

fn blas(paths: &SearchPaths) -> Result<Found, CudaError> {
    const NAME: &str = "libcublasLt.so.13";
    for folder in &paths.folders {
        let path = folder.join(NAME);
        if path.is_file() && open(&path).is_ok() {
            return Ok(Found { library: NAME, path: Some(path) });
        }
    }
    match open(Path::new(NAME)) {
        Ok(()) => Ok(Found { library: NAME, path: None }),
        Err(why) => Err(CudaError::Missing {
            what: format!(
                "{NAME} was not found by name ({why}) nor in {} folders: {}",
                paths.folders.len(),
                shown(&paths.folders)
            ),
            todo: "install CUDA 13's cuBLAS (the package libcublas-13-0, or the Python package nvidia-cublas), or set CUDA_HOME"
                .into(),
        }),
    }
}

fn shown(folders: &[PathBuf]) -> String {
    folders.iter().map(|f| f.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Opens a library for the rest of the process, so that later look-ups by its plain name find it.
fn open(path: &Path) -> Result<(), String> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    // SAFETY: cuBLASLt's initialisers are made to run in any process; the handle is never closed.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map_err(|e| e.to_string())?;
    std::mem::forget(library);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wheels_of_an_environment_are_searched_in_order() {
        let root = std::env::temp_dir().join(format!("drafthorse-loader-{}", std::process::id()));
        for name in ["cublas", "cu13"] {
            std::fs::create_dir_all(root.join("lib/python3.12/site-packages/nvidia").join(name).join("lib")).unwrap();
        }
        let env = |name: &str| (name == "VIRTUAL_ENV").then(|| root.clone().into_os_string());
        let folders = SearchPaths::usual(env).folders;
        let packages = root.join("lib/python3.12/site-packages/nvidia");
        assert_eq!(folders[..2], [packages.join("cu13/lib"), packages.join("cublas/lib")]);
        assert_eq!(folders.last().unwrap(), Path::new("/usr/local/cuda/lib64"));
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_missing_library_names_itself_and_its_cure() {
        let nowhere = SearchPaths { folders: vec!["/nonexistent".into()] };
        // Machines with CUDA installed find it by name; all others must say what to do.
        if let Err(CudaError::Missing { what, todo }) = blas(&nowhere) {
            assert!(what.contains("libcublasLt.so.13") && what.contains("/nonexistent"), "{what}");
            assert!(todo.contains("nvidia-cublas"), "{todo}");
        }
    }
}
