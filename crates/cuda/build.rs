//! Compiles `kernels/*.cu` ahead of time into fatbins that the program embeds.
//!
//! Job: find nvcc 13 (`NVCC`, `CUDA_HOME`, `PATH`, the virtual environment `.cuda` that `cargo xtask cuda-toolkit` makes), compile each file for
//! sm_80 and sm_90 (sm_90a where it has wgmma code) and as PTX, on all cores, and only what changed. Refuses to stop a build on a machine without nvcc:
//! it then embeds nothing, sets `no_kernels`, and the executor says so; `DRAFTHORSE_KERNELS=required` makes it an error.
//! `DRAFTHORSE_CUDA_ARCHS=90` compiles for Hopper alone, for quick turns while kernels are written.
//! Invariant: a cached fatbin is keyed by the compiler's version, the flags, the file and every header it includes.

use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

const HOW: &str = "run `cargo xtask cuda-toolkit`, or set NVCC or CUDA_HOME to a CUDA 13 toolkit";

fn main() {
    println!("cargo:rustc-check-cfg=cfg(no_kernels)");
    println!("cargo:rerun-if-changed=kernels");
    for name in ["NVCC", "CUDA_HOME", "DRAFTHORSE_KERNELS", "DRAFTHORSE_CUDA_ARCHS"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let required = env::var("DRAFTHORSE_KERNELS").is_ok_and(|v| v == "required");
    let images = match find_nvcc() {
        Some(nvcc) => compile_all(&nvcc, &cache_folder(&out)),
        None => Err(format!("no nvcc found: {HOW}")),
    };
    let images = images.unwrap_or_else(|why| {
        assert!(!required, "{why}");
        println!("cargo:warning=no CUDA kernels in this build: {why}");
        println!("cargo:rustc-cfg=no_kernels");
        Vec::new()
    });
    let mut table = String::from("/// Name and fatbin of every kernel file.\npub static IMAGES: &[(&str, &[u8])] = &[\n");
    for (name, path) in images {
        writeln!(table, "    ({name:?}, include_bytes!({:?})),", path.display().to_string()).expect("a String takes every write");
    }
    table.push_str("];\n");
    fs::write(out.join("images.rs"), table).expect("OUT_DIR is writable");
}

/// The package's folder, asked for when the script runs: one that was baked in could be another checkout's, where two share a target folder.
fn package() -> PathBuf {
    PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"))
}

fn find_nvcc() -> Option<PathBuf> {
    let mut places: Vec<PathBuf> = env::var_os("NVCC").map(PathBuf::from).into_iter().collect();
    places.extend(env::var_os("CUDA_HOME").map(|h| Path::new(&h).join("bin/nvcc")));
    places.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()).map(|p| p.join("nvcc")));
    let root = package().join("../../.cuda/lib");
    for python in fs::read_dir(root).into_iter().flatten().flatten() {
        places.push(python.path().join("site-packages/nvidia/cu13/bin/nvcc"));
    }
    places.push("/usr/local/cuda/bin/nvcc".into());
    places.into_iter().find(|p| p.is_file())
}

/// A folder that outlives this build script's own: fatbins are costly and shared by all profiles.
fn cache_folder(out: &Path) -> PathBuf {
    let folder = out.ancestors().nth(4).unwrap_or(out).join("kernels");
    fs::create_dir_all(&folder).expect("the target folder is writable");
    folder
}

/// The file and everything it includes with quotes, directly or through others, in a fixed order.
fn sources(file: &Path, found: &mut BTreeSet<PathBuf>) -> std::io::Result<()> {
    if !found.insert(file.to_path_buf()) {
        return Ok(());
    }
    for line in fs::read_to_string(file)?.lines() {
        if let Some(name) = line.trim().strip_prefix("#include \"").and_then(|l| l.strip_suffix('"')) {
            sources(&file.parent().expect("a file lies in a folder").join(name), found)?;
        }
    }
    Ok(())
}

fn compile_all(nvcc: &Path, cache: &Path) -> Result<Vec<(String, PathBuf)>, String> {
    let run = |c: &mut Command| c.output().map_err(|e| format!("cannot run {}: {e}", nvcc.display()));
    let version = run(Command::new(nvcc).arg("--version"))?.stdout;
    if !String::from_utf8_lossy(&version).contains("release 13.") {
        return Err(format!("{} is not CUDA 13: {HOW}", nvcc.display()));
    }
    let folder = package().join("kernels");
    let mut files: Vec<PathBuf> = fs::read_dir(&folder)
        .map_err(|e| e.to_string())?
        .flatten()
        .map(|f| f.path())
        .filter(|p| p.extension().is_some_and(|e| e == "cu"))
        .collect();
    files.sort();
    let queue = Mutex::new(files.clone());
    let results = Mutex::new(Vec::new());
    // What `cargo build -j` allows.
    let workers = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(file) = { queue.lock().expect("no compile thread panics").pop() } {
                    let result = compile(nvcc, &version, &file, cache);
                    results.lock().expect("no compile thread panics").push((file, result));
                }
            });
        }
    });
    let mut images = Vec::new();
    for (file, result) in results.into_inner().expect("no compile thread panics") {
        images.push((file.file_stem().expect("a .cu file has a name").to_string_lossy().into_owned(), result?));
    }
    images.sort();
    Ok(images)
}

fn compile(nvcc: &Path, version: &[u8], file: &Path, cache: &Path) -> Result<PathBuf, String> {
    let mut found = BTreeSet::new();
    sources(file, &mut found).map_err(|e| format!("{}: {e}", file.display()))?;
    let texts: Vec<String> =
        found.iter().map(|p| fs::read_to_string(p).map_err(|e| format!("{}: {e}", p.display()))).collect::<Result<_, _>>()?;
    // wgmma and setmaxnreg exist in code for sm_90a only, and every Hopper GPU runs that.
    let hopper =
        if texts.iter().any(|t| t.contains("HOPPER_KERNELS")) && texts.iter().any(|t| t.contains("__launch_bounds__(384")) {
            "90a"
        } else {
            "90"
        };
    let mut flags = ["-std=c++17", "-O3", "-DNDEBUG", "-fatbin"].map(str::to_owned).to_vec();
    match env::var("DRAFTHORSE_CUDA_ARCHS").as_deref() {
        Ok("90") => {}
        Ok(other) => return Err(format!("DRAFTHORSE_CUDA_ARCHS={other}: leave it out for all architectures, or set it to 90")),
        Err(_) => flags.push("-gencode=arch=compute_80,code=[sm_80,compute_80]".to_owned()),
    }
    flags.push(format!("-gencode=arch=compute_{hopper},code=sm_{hopper}"));
    let mut hash = Sha256::new();
    hash.update(version);
    flags.iter().for_each(|f| hash.update(f));
    texts.iter().for_each(|t| hash.update(t));
    let digest: String = hash.finalize().iter().take(12).fold(String::new(), |mut s, b| {
        write!(s, "{b:02x}").expect("a String takes every write");
        s
    });
    let stem = file.file_stem().expect("a .cu file has a name").to_string_lossy();
    let target = cache.join(format!("{stem}.{digest}.fatbin"));
    if target.is_file() {
        return Ok(target);
    }
    let partial = cache.join(format!("{stem}.{digest}.{}", std::process::id()));
    let mut command = Command::new(nvcc);
    command.args(&flags).arg("-o").arg(&partial).arg(file);
    // The wheels keep the headers beside the compiler, where nvcc's own profile does not look.
    if let Some(include) = nvcc.parent().and_then(Path::parent).map(|p| p.join("include")).filter(|p| p.is_dir()) {
        command.arg("-I").arg(include);
    }
    let output = command.output().map_err(|e| format!("cannot run {}: {e}", nvcc.display()))?;
    if !output.status.success() {
        return Err(format!("{} does not compile:\n{}", file.display(), String::from_utf8_lossy(&output.stderr)));
    }
    fs::rename(&partial, &target).map_err(|e| format!("{}: {e}", target.display()))?;
    Ok(target)
}
