//! The launcher that starts an older copy.
//!
//! What happened: the fix was in place, but the script that started the run named an older copy; everything looked deployed. Here the program is asked who it
//! is, and the run is asked what it runs; neither a file that lies there nor its hash counts.

use drafthorse_remote::RemoteError;
use drafthorse_remote::chain::Chain;
use drafthorse_remote::far::Far;
use drafthorse_remote::files::sha256_file;
use drafthorse_remote::verify::{Meant, entry, verify};
use drafthorse_telemetry::{Event, Expected, Identity, Limits, Options, Telemetry, Watcher, read_status, unix_ms};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

fn far() -> Far {
    Far::new(Chain::default(), Default::default())
}

fn program(path: &Path, text: &str) -> String {
    std::fs::write(path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

/// A run of this very process that says it is `build_id`.
fn run_of(build_id: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let telemetry = Telemetry::start(Options::new(dir.path(), "r")).unwrap();
    telemetry.recorder().record(Event::Run(Identity {
        build_id: build_id.into(),
        config_hash: "c".into(),
        pid: std::process::id(),
        started_t: unix_ms(),
        ..Default::default()
    }));
    telemetry.shutdown().unwrap();
    dir
}

#[test]
fn a_launcher_that_starts_an_older_copy_is_found_out() {
    let dir = tempfile::tempdir().unwrap();
    let new = program(&dir.path().join("new"), "echo '{\"build_id\": \"new\"}'");
    let old = program(&dir.path().join("old"), "echo '{\"build_id\": \"old\"}'");
    let launcher = program(&dir.path().join("start.sh"), &format!("exec '{old}' \"$@\""));
    assert_eq!(entry(&far(), &new, "new").unwrap(), "new");
    let error = entry(&far(), &launcher, "new").unwrap_err();
    assert!(matches!(&error, RemoteError::StaleEntry { found, .. } if found == "old"), "{error}");
}

#[test]
fn a_run_is_asked_what_it_runs() {
    let meant = |build_id: &str, program_sha256: String| Meant {
        build_id: build_id.into(),
        program_sha256,
        config_hash: Some("c".into()),
        deployed_t: Some(1),
    };
    let own = sha256_file(&std::env::current_exe().unwrap()).unwrap();
    let run = run_of("old");
    let at = run.path().display().to_string();
    let error = verify(&far(), &at, &meant("new", own.clone())).unwrap().check("r").unwrap_err().to_string();
    assert!(error.contains("the run does not contain your change: its build is old, yours is new"), "{error}");
    // It may even claim the right build: the process's own program tells.
    let error = verify(&far(), &at, &meant("old", "0".repeat(64))).unwrap().check("r").unwrap_err().to_string();
    assert!(error.contains("its program (SHA-256) is"), "{error}");
    verify(&far(), &at, &meant("old", own)).unwrap().check("r").unwrap();
    // Whoever watches it is told, whatever else is well.
    let status = read_status(run.path()).unwrap().unwrap();
    let mut watcher = Watcher::new(Expected { build_id: Some("new".into()), ..Expected::default() }, Limits::default());
    assert_eq!(watcher.observe(&status, unix_ms()).state.name(), "not your code");
}
