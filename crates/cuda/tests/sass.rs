//! What the compiler made of the kernels: tensor-core instructions where they are meant, and nothing spilled to local memory.
//!
//! Runs where this build has kernels and `cuobjdump` is found (CUOBJDUMP, PATH, beside NVCC, in `.cuda`); skips loudly elsewhere, and fails under
//! DRAFTHORSE_KERNELS=required.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

fn cuobjdump() -> Option<PathBuf> {
    let mut places: Vec<PathBuf> = std::env::var_os("CUOBJDUMP").map(PathBuf::from).into_iter().collect();
    places.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).map(|p| p.join("cuobjdump")));
    places.extend(std::env::var_os("NVCC").map(|n| PathBuf::from(n).with_file_name("cuobjdump")));
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../.cuda/lib");
    let pythons = std::fs::read_dir(root).into_iter().flatten().flatten();
    places.extend(pythons.map(|python| python.path().join("site-packages/nvidia/cu13/bin/cuobjdump")));
    places.into_iter().find(|p| p.is_file())
}

/// (architecture, function) → instructions.
fn functions(tool: &PathBuf, name: &str, image: &[u8]) -> BTreeMap<(String, String), String> {
    let file = std::env::temp_dir().join(format!("drafthorse-{}-{name}.fatbin", std::process::id()));
    std::fs::write(&file, image).unwrap();
    let output = Command::new(tool).arg("--dump-sass").arg(&file).output().unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    let (mut arch, mut function, mut all) = (String::new(), String::new(), BTreeMap::<_, String>::new());
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        if let Some(a) = line.trim().strip_prefix("code for ") {
            arch = a.to_owned();
        } else if let Some(f) = line.trim().strip_prefix("Function : ") {
            function = f.to_owned();
        } else {
            let text = all.entry((arch.clone(), function.clone())).or_default();
            text.push_str(line);
            text.push('\n');
        }
    }
    all.retain(|(_, f), _| !f.is_empty());
    all
}

#[test]
fn kernels_use_tensor_cores_where_meant_and_spill_nothing() {
    let required = std::env::var("DRAFTHORSE_KERNELS").is_ok_and(|v| v == "required");
    let (images, tool) = (drafthorse_cuda::images(), cuobjdump());
    let Some(tool) = tool.filter(|_| !images.is_empty()) else {
        assert!(
            !required,
            "DRAFTHORSE_KERNELS=required, and there are {} kernel files and no cuobjdump or no kernels",
            images.len()
        );
        eprintln!("SKIPPED sass: no cuobjdump, or a build without kernels");
        return;
    };
    let mut faults = Vec::new();
    let mut seen = 0;
    for (name, image) in images {
        for ((arch, function), text) in functions(&tool, name, image) {
            seen += 1;
            let has = |instruction: &str| text.contains(&format!(" {instruction}"));
            if has("LDL") || has("STL") {
                faults.push(format!("{function} ({arch}) uses local memory"));
            }
            let products = name.contains("attention") && !function.contains("combine");
            let (want, wgmma) = (if function.ends_with("_wgmma") { "HGMMA" } else { "HMMA" }, function.ends_with("_wgmma"));
            if products && !has(want) {
                faults.push(format!("{function} ({arch}) has no {want}"));
            }
            if wgmma && arch != "sm_90a" {
                faults.push(format!("{function} is compiled for {arch}"));
            }
        }
    }
    assert!(seen > 60, "only {seen} functions were found");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
