//! Far ends of local processes: a container that sees another folder, broken hops, missing tools, cut transfers, a full disk.

use drafthorse_remote::RemoteError;
use drafthorse_remote::chain::{Chain, Hop};
use drafthorse_remote::far::{Far, Input};
use drafthorse_remote::files::sha256_file;
use drafthorse_remote::probe::probe;
use drafthorse_remote::transfer::{Item, inventory, put};
use drafthorse_remote::verify::look_on_the_way;
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// An executable script.
fn script(path: &Path, text: &str) -> String {
    std::fs::write(path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

fn far(hops: &[Vec<&str>]) -> Far {
    let hops = hops.iter().map(|h| Hop::new(h.iter().map(|w| (*w).to_owned()).collect()).unwrap());
    Far::new(Chain::new(hops.collect()), BTreeMap::new())
}

/// A host and a container in it, each with a folder of its own under the same name: `enter NAME COMMAND…` like `pct exec`.
struct Lab {
    dir: tempfile::TempDir,
    host: String,
    enter: String,
}

impl Lab {
    fn new() -> Lab {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        ["host/dh", "box one/dh"].iter().for_each(|n| std::fs::create_dir_all(at(n)).unwrap());
        let host = script(
            &at("ssh"),
            &format!("shift\ncd '{}/host' || exit 255\necho 'Welcome to the lab!'\nexec sh -c \"$*\"", dir.path().display()),
        );
        let enter = script(
            &at("enter"),
            &format!(
                "cd '{}' && cd \"$1\" 2>/dev/null || {{ echo \"enter: no container '$1'\" >&2; exit 1; }}\nshift\nexec \"$@\"",
                dir.path().display()
            ),
        );
        Lab { dir, host, enter }
    }

    fn far(&self, container: &str) -> Far {
        far(&[vec![&self.host, "root@host"], vec![&self.enter, container]])
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn item(&self, content: &[u8]) -> Item {
        let local = self.at("local file");
        std::fs::write(&local, content).unwrap();
        let sha256 = sha256_file(&local).unwrap();
        Item {
            what: "the file".into(),
            size_bytes: content.len() as u64,
            sha256,
            local,
            to: "dh/sub dir/f".into(),
            executable: true,
        }
    }
}

fn content(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * 7919 % 251) as u8).collect()
}

#[test]
fn a_file_lands_inside_and_is_hashed_there() {
    let lab = Lab::new();
    let far = lab.far("box one");
    let item = lab.item(&content(1_000_000));
    assert_eq!(inventory(&far, "dh", std::slice::from_ref(&item.to), false).unwrap(), [None]);
    let told = AtomicU64::new(0);
    assert_eq!(put(&far, "dh", &item, &|n| told.store(n, Ordering::Relaxed)).unwrap(), 0);
    assert_eq!(told.load(Ordering::Relaxed), 1_000_000);
    let inside = lab.at("box one/dh/sub dir/f");
    assert_eq!(sha256_file(&inside).unwrap(), item.sha256);
    assert_eq!(std::fs::metadata(&inside).unwrap().permissions().mode() & 0o111, 0o111);
    assert!(!lab.at("host/dh/sub dir").exists(), "nothing lands on the host");
    assert_eq!(
        inventory(&far, "dh", &[item.to.clone(), "dh/none".into()], true).unwrap(),
        [Some((1_000_000, item.sha256)), None]
    );
}

#[test]
fn a_remembered_hash_is_used_until_the_file_is_newer() {
    let lab = Lab::new();
    let far = lab.far("box one");
    let file = lab.at("box one/dh/f");
    let hash = |remembered| inventory(&far, "dh", &["dh/f".into()], remembered).unwrap()[0].clone().unwrap().1;
    std::fs::write(&file, "one").unwrap();
    let first = hash(true);
    let side = std::fs::read_dir(lab.at("box one/dh/.hashes")).unwrap().next().unwrap().unwrap().path();
    std::fs::write(&side, "3 planted\n").unwrap();
    assert_eq!(hash(true), "planted");
    assert_eq!(hash(false), first, "a fresh look hashes");
    std::fs::write(&side, "3 planted\n").unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    std::fs::write(&file, "two").unwrap();
    assert!(!["planted", &first].contains(&hash(true).as_str()));
}

#[test]
fn a_file_on_the_host_is_detected_as_not_where_the_program_runs() {
    let lab = Lab::new();
    let item = lab.item(b"fix");
    let far = lab.far("box one");
    std::fs::write(lab.at("box one/dh/f"), "old").unwrap();
    std::fs::copy(&item.local, lab.at("host/dh/f")).unwrap();
    let told = look_on_the_way(&far, "dh/f", &item.sha256).unwrap_err().to_string();
    assert!(told.contains("not where the program runs") && told.contains("root@host"), "{told}");
    std::fs::copy(&item.local, lab.at("box one/dh/f")).unwrap();
    look_on_the_way(&far, "dh/f", &item.sha256).unwrap();
}

#[test]
fn the_hop_that_does_not_lead_on_is_named() {
    let lab = Lab::new();
    let told = |far: Far| far.must("a test", "echo hi", &[], "").unwrap_err().to_string();
    let text = told(lab.far("box two"));
    assert!(text.contains("hop 2 of 2") && text.contains("no container 'box two'") && text.contains("hop 1 answers"), "{text}");
    let down = script(&lab.at("down"), "echo 'ssh: connect to host lab port 22: No route to host' >&2; exit 255");
    let text = told(far(&[vec![&down, "root@lab"], vec![&lab.enter, "box one"]]));
    assert!(text.contains("hop 1 of 2") && text.contains("No route to host"), "{text}");
    let text = told(far(&[vec!["/no/such/ssh", "h"]]));
    assert!(text.contains("/no/such/ssh") && text.contains("first hop"), "{text}");
}

#[test]
fn greetings_are_told_apart_and_codes_come_back() {
    let lab = Lab::new();
    let far = lab.far("box one");
    let answer = far.script("a test", "cat; echo err >&2; exit 7", &[], Input::Text("in\n")).unwrap();
    assert_eq!((answer.code, answer.out.as_str(), answer.err.trim()), (7, "in\n", "err"));
    let mut out = Vec::new();
    let code = far.pass_through("dh", &["sh", "-c", "pwd; exit 3"].map(str::to_owned), &mut out).unwrap();
    assert_eq!(code, 3);
    assert!(String::from_utf8(out).unwrap().ends_with("box one/dh\n"), "no greeting comes through");
    let error = far.pass_through("nowhere", &["true".to_owned()], &mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("folder nowhere"), "{error}");
}

#[test]
fn a_cut_transfer_goes_on_where_it_was_cut() {
    let lab = Lab::new();
    let item = lab.item(&content(3_000_000));
    // The connection dies after a megabyte, as when ssh is killed: no end mark comes back.
    std::fs::create_dir(lab.at("bin")).unwrap();
    let cut = "case \"$*\" in *'cat >>'*) head -c 1000000 | sh -c \"$*\" | head -n 1; exit 255;; *) exec sh -c \"$*\";; esac";
    script(&lab.at("bin/ssh"), &format!("shift\ncd '{}/host'\n{cut}", lab.dir.path().display()));
    let broken = far(&[vec![&lab.at("bin/ssh").display().to_string(), "root@host"], vec![&lab.enter, "box one"]]);
    let error = put(&broken, "dh", &item, &|_| {}).unwrap_err();
    assert!(matches!(error, RemoteError::Lost { .. }), "{error}");
    let part = lab.at("box one/dh/.parts").join(&item.sha256);
    assert_eq!(std::fs::metadata(&part).unwrap().len(), 1_000_000);
    assert!(!lab.at("box one/dh/sub dir/f").exists(), "half a file is never in its place");
    assert_eq!(put(&lab.far("box one"), "dh", &item, &|_| {}).unwrap(), 1_000_000, "a megabyte was there");
    assert_eq!(sha256_file(&lab.at("box one/dh/sub dir/f")).unwrap(), item.sha256);
    assert!(!part.exists());
}

#[test]
fn a_spoilt_part_is_sent_again_and_a_file_that_changed_here_is_said() {
    let lab = Lab::new();
    let item = lab.item(&content(10_000));
    std::fs::create_dir_all(lab.at("box one/dh/.parts")).unwrap();
    std::fs::write(lab.at("box one/dh/.parts").join(&item.sha256), vec![0; 5_000]).unwrap();
    put(&lab.far("box one"), "dh", &item, &|_| {}).unwrap();
    assert_eq!(sha256_file(&lab.at("box one/dh/sub dir/f")).unwrap(), item.sha256);
    std::fs::write(&item.local, content(10_001)).unwrap();
    std::fs::remove_file(lab.at("box one/dh/sub dir/f")).unwrap();
    let error = put(&lab.far("box one"), "dh", &Item { sha256: "0".repeat(64), ..item }, &|_| {}).unwrap_err();
    assert!(matches!(error, RemoteError::Changed { .. }), "{error}");
}

#[test]
fn a_link_that_corrupts_is_caught_by_the_far_hash() {
    let lab = Lab::new();
    let bad = script(&lab.at("bad"), "case \"$3\" in *'cat >>'*) tr a b | \"$@\";; *) exec \"$@\";; esac");
    let item = lab.item(b"aaaa");
    let error = put(
        &far(&[vec![&bad]]),
        &lab.at("host/dh").display().to_string(),
        &Item { to: lab.at("host/dh/f").display().to_string(), ..item },
        &|_| {},
    );
    let error = error.unwrap_err();
    assert!(matches!(error, RemoteError::WrongHash { .. }), "{error}");
    assert!(!lab.at("host/dh/f").exists());
}

#[test]
fn missing_tools_are_named() {
    let lab = Lab::new();
    // A far end whose PATH holds everything that is needed but one tool.
    let bin = lab.at("bin");
    std::fs::create_dir(&bin).unwrap();
    for tool in ["sh", "cat", "mkdir", "mv", "chmod", "rm", "ln", "wc", "df", "uname"] {
        let found = std::env::split_paths(&std::env::var_os("PATH").unwrap()).map(|p| p.join(tool)).find(|p| p.exists()).unwrap();
        std::os::unix::fs::symlink(found, bin.join(tool)).unwrap();
    }
    let path = format!("PATH={}", bin.display());
    let error = probe(&far(&[vec!["env", &path]]), "/tmp").unwrap_err().to_string();
    assert!(error.contains("lacks sha256sum") && error.contains("coreutils"), "{error}");
}

#[test]
fn a_hop_that_changes_arguments_is_found_out() {
    let lab = Lab::new();
    // Takes apart what it should hand on as it is.
    let careless = script(&lab.at("careless"), "s=$1; c=$2; t=$3; shift 3; exec $s $c \"$t\" $*");
    let error = probe(&far(&[vec![&careless]]), "/tmp").unwrap_err();
    assert!(matches!(error, RemoteError::Garbled { .. }), "{error}");
}

/// A file system of one megabyte, where mounting is allowed.
#[test]
fn a_full_disk_is_said_and_what_arrived_is_kept() {
    let lab = Lab::new();
    let small = lab.at("small");
    std::fs::create_dir(&small).unwrap();
    let enter = script(
        &lab.at("mounted"),
        &format!(
            "exec nsenter --mount=/proc/$(cat '{}')/ns/mnt --user=/proc/$(cat '{0}')/ns/user -- \"$@\"",
            lab.at("pid").display()
        ),
    );
    let hold = format!(
        "mount -t tmpfs -o size=1m tmpfs '{}' && echo $$ > '{}' && exec sleep 60",
        small.display(),
        lab.at("pid").display()
    );
    let mut holder = std::process::Command::new("unshare").args(["-Urm", "sh", "-c", &hold]).spawn().ok();
    for _ in 0..100 {
        if lab.at("pid").exists() && std::fs::metadata(lab.at("pid")).unwrap().len() > 0 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    if !lab.at("pid").exists() {
        eprintln!("SKIPPED: this machine lets nobody mount a tmpfs in a namespace, so a full disk was NOT tested");
        holder.iter_mut().for_each(|h| drop(h.kill()));
        return;
    }
    let folder = small.display().to_string();
    let item = Item { to: format!("{folder}/f"), ..lab.item(&content(3_000_000)) };
    let error = put(&far(&[vec![&enter]]), &folder, &item, &|_| {}).unwrap_err();
    holder.iter_mut().for_each(|h| {
        let _ = h.kill();
        let _ = h.wait();
    });
    let RemoteError::DiskFull { at, .. } = error else { panic!("{error}") };
    assert!(at > 500_000 && at < 1_100_000, "{at}");
}
