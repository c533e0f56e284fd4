//! A fix on the host, the run in the container: two file systems, one name.
//!
//! What happened: a fix was copied to the host while the run lived in a container; a syntax check passed on the host's copy, and days of runs did not have it.
//! Here a host and a container see different folders under the same name; what is sent lands inside, and what lies outside is not taken for it.

use drafthorse_remote::RemoteError;
use drafthorse_remote::chain::{Chain, Hop};
use drafthorse_remote::far::Far;
use drafthorse_remote::files::sha256_file;
use drafthorse_remote::transfer::{Item, inventory, put};
use drafthorse_remote::verify::look_on_the_way;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// A command that goes to `folder` and runs its arguments there, after `skip` of its own: a host's `ssh`, a container's `exec`.
fn hop(at: &Path, folder: &Path, skip: usize) -> Hop {
    std::fs::create_dir_all(folder).unwrap();
    let text = format!("#!/bin/sh\nshift {skip}\ncd '{}'\nexec \"$@\"\n", folder.display());
    std::fs::write(at, text).unwrap();
    std::fs::set_permissions(at, std::fs::Permissions::from_mode(0o755)).unwrap();
    let words = std::iter::once(at.display().to_string()).chain((0..skip).map(|i| format!("word{i}")));
    Hop::new(words.collect()).unwrap()
}

#[test]
fn a_file_goes_where_the_program_runs_and_nowhere_else() {
    let dir = tempfile::tempdir().unwrap();
    let (host, container) = (dir.path().join("host"), dir.path().join("container"));
    let chain = Chain::new(vec![hop(&dir.path().join("enter-host"), &host, 1), hop(&dir.path().join("enter"), &container, 2)]);
    let far = Far::new(chain, Default::default());
    let local = dir.path().join("fix.rs");
    std::fs::write(&local, "the fix").unwrap();
    let sha256 = sha256_file(&local).unwrap();
    let item = Item { what: "fix".into(), size_bytes: 7, sha256, local, to: "app/fix.rs".into(), executable: false };

    // As it was done by hand: onto the host. The far end does not have it, and the place where it lies is named.
    std::fs::create_dir(host.join("app")).unwrap();
    std::fs::copy(&item.local, host.join("app/fix.rs")).unwrap();
    assert_eq!(inventory(&far, "app", std::slice::from_ref(&item.to), false).unwrap(), [None]);
    let error = look_on_the_way(&far, &item.to, &item.sha256).unwrap_err();
    assert!(matches!(&error, RemoteError::WrongFilesystem { outer, .. } if outer.contains("enter-host")), "{error}");

    // Through the chain that runs the program: inside, by the inside's own hash.
    put(&far, "app", &item, &|_| {}).unwrap();
    assert_eq!(inventory(&far, "app", std::slice::from_ref(&item.to), false).unwrap(), [Some((7, item.sha256.clone()))]);
    assert_eq!(std::fs::read_to_string(container.join("app/fix.rs")).unwrap(), "the fix");
    look_on_the_way(&far, &item.to, &item.sha256).unwrap();
}
