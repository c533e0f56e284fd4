//! launch, ps, watch, stop, restart, rollback, report and deploy, with the real binary: on this machine, through shells, and through a real sshd into a
//! container with its own file system and process ids where this machine allows that.

mod common;

use common::{Place, drafthorse, ok, ok_json, run};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A place whose run is stopped whatever the test does.
struct Yard {
    place: Place,
    config: String,
    runs: String,
}

impl Yard {
    fn new() -> Yard {
        let place = Place::with_data();
        let config = place.config();
        // Long enough to be stopped, and saved often enough to be gone on with.
        let text =
            std::fs::read_to_string(&config).unwrap().replace("steps = 6", "steps = 400000").replace("every = 3", "every = 0");
        std::fs::write(&config, text.replace("every = 2", "every = 25")).unwrap();
        let runs = place.at("runs");
        Yard { place, config, runs }
    }

    fn ps(&self) -> Vec<Value> {
        let list = ok_json(&["ps", "--runs", &self.runs]);
        list.as_array().unwrap().clone()
    }

    fn newest(&self) -> Value {
        self.ps().pop().unwrap()
    }

    fn until(&self, what: &str) {
        ok(&["watch", "run", "--runs", &self.runs, "--until", what, "--timeout", "2m"]);
    }

    /// Waits until the newest launch is as wanted.
    fn wait(&self, wanted: impl Fn(&Value) -> bool) -> Value {
        let begun = Instant::now();
        loop {
            let newest = self.newest();
            if wanted(&newest) {
                return newest;
            }
            assert!(begun.elapsed() < Duration::from_secs(120), "{newest}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Yard {
    fn drop(&mut self) {
        let _ = run(&["stop", "run", "--wait", "20", "--runs", &self.runs]);
    }
}

fn script(path: &Path, text: &str) -> String {
    std::fs::write(path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

/// Session of a process, from the kernel.
fn session(pid: u64) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit(')').next().unwrap().split_whitespace().nth(3).unwrap().parse().unwrap()
}

fn step(launch: &Value) -> u64 {
    launch["step"].as_u64().unwrap_or(0)
}

#[test]
fn a_launched_run_stands_alone_and_is_stopped_restarted_and_rolled_back() {
    let yard = Yard::new();
    let begun = ok_json(&["launch", &yard.config]);
    let pid = begun["pid"].as_u64().unwrap();
    assert_ne!(session(pid), session(u64::from(std::process::id())), "a session of its own");
    let (code, _, err) = run(&["launch", &yard.config]);
    assert!(code == 3 && err.contains("goes on") && err.contains("drafthorse stop run"), "{err}");
    yard.until("step=30");
    assert_eq!(yard.newest()["state"], "running");
    let (code, _, err) = run(&["restart", "run", "--runs", &yard.runs]);
    assert!(code == 2 && err.contains("--resume"), "{err}");

    let both = ok_json(&["restart", "run", "--resume", "--runs", &yard.runs, "--config", &yard.config, "optimizer.lr=1e-3"]);
    let kept = both["stopped"]["step"].as_u64().unwrap();
    assert_eq!((both["begun"]["resumed_from_step"].as_u64(), both["stopped"]["forced"].as_bool()), (Some(kept), Some(false)));
    assert_ne!(both["begun"]["config_hash"], begun["config_hash"]);
    yard.until(&format!("step={}", kept + 60));

    let back = ok_json(&["rollback", "run", "--runs", &yard.runs]);
    assert_eq!((back["begun"]["resumed_from_step"].as_u64(), &back["begun"]["config_hash"]), (Some(kept), &begun["config_hash"]));
    let (code, _, err) = run(&["rollback", "run", "--runs", &yard.runs]);
    assert!(code == 3 && err.contains("took over from none"), "{err}");

    let stopped = ok_json(&["stop", "run", "--runs", &yard.runs]);
    assert!(stopped["was_running"].as_bool().unwrap() && stopped["checkpoint"].as_str().unwrap().contains("step-"), "{stopped}");
    let states: Vec<String> = yard.ps().iter().map(|l| l["state"].as_str().unwrap().to_owned()).collect();
    assert_eq!(states, ["stopped"; 3]);
    let (code, out, _) = run(&["watch", "run", "--runs", &yard.runs]);
    assert!(code == 8 && out.contains("stopped"), "{out}");

    let report = yard.place.at("report.html");
    ok(&["report", "run", "--runs", &yard.runs, "-o", &report]);
    let html = std::fs::read_to_string(report).unwrap();
    for word in ["config.toml", "launch: log", "SIGTERM", "id=\"dump\"", "this program"] {
        assert!(html.contains(word), "{word} is not in the report");
    }
    let differences = ok_json(&["runs", "diff", "run", &yard.place.at("runs/run"), "--runs", &yard.runs]);
    assert_eq!(differences, serde_json::json!([]));
}

#[test]
fn a_killed_trainer_is_started_again_and_goes_on() {
    let yard = Yard::new();
    let begun = ok_json(&["launch", &yard.config, "--backoff", "0.1"]);
    yard.until("checkpoint");
    Command::new("kill").args(["-9", &begun["pid"].to_string()]).status().unwrap();
    let again = yard.wait(|l| l["attempts"] == 2 && l["state"] == "running" && step(l) > 0);
    assert_ne!(again["pid"], begun["pid"]);
    let state = std::fs::read_to_string(PathBuf::from(again["folder"].as_str().unwrap()).join("state.json")).unwrap();
    assert!(state.contains("signal 9"), "{state}");
}

#[test]
fn a_restart_that_fails_before_its_first_step_puts_the_old_build_back() {
    let yard = Yard::new();
    let begun = ok_json(&["launch", &yard.config]);
    yard.until("step=30");
    // Another shape cannot go on from this checkpoint.
    let (code, _, err) = run(&["restart", "run", "--resume", "--runs", &yard.runs, "--config", &yard.config, "drafter.layers=2"]);
    assert_eq!(code, 3, "{err}");
    assert!(err.contains("failed before its first step") && err.contains("another shape") && err.contains("put back"), "{err}");
    let back = yard.wait(|l| l["state"] == "running" && step(l) > 30);
    assert_eq!((&back["config_hash"], yard.ps().len()), (&begun["config_hash"], 3));
}

#[test]
fn a_wrong_launch_says_what_the_trainer_said() {
    let yard = Yard::new();
    let (code, _, err) = run(&["launch", &yard.config, "drafter.target_layer_ids=[99]"]);
    assert!(code == 3 && err.contains("target_layer_ids"), "{err}");
    let (code, _, err) = run(&["watch", "nobody", "--runs", &yard.runs]);
    assert!(code == 3 && err.contains("nobody"), "{err}");
    let (code, _, err) = run(&["ps", "--to", "lab", "--destinations", &yard.place.at("none.toml")]);
    assert!(code == 3 && err.contains("none.toml"), "{err}");
}

#[test]
fn the_live_page_is_served_when_it_is_asked_for() {
    let yard = Yard::new();
    ok(&["launch", &yard.config, "--http", "0"]);
    yard.until("step=5");
    let info: Value = serde_json::from_slice(&std::fs::read(yard.place.path("runs/run/http.json")).unwrap()).unwrap();
    let page = ok_json(&["watch", "run", "--runs", &yard.runs, "--web"]);
    assert_eq!(page["url"], info["url"], "the run's own page");
    assert!(info["url"].as_str().unwrap().starts_with("http://127.0.0.1:"), "{info}");
    let status: Value = serde_json::from_slice(&std::fs::read(yard.place.path("runs/run/status.json")).unwrap()).unwrap();
    assert!(
        status["plan"]["devices"][0]["planned_bytes"].as_u64().unwrap() > 0 && status["work"].as_u64().unwrap() > 0,
        "{status}"
    );
}

#[test]
fn what_is_deployed_is_what_runs_and_a_change_shows() {
    let yard = Yard::new();
    let ssh = script(&yard.place.path("ssh"), "shift\necho 'Welcome!'\nexec sh -c \"$*\"");
    let old = script(&yard.place.path("old.sh"), "echo '{\"build_id\": \"older\"}'");
    let folder = yard.place.at("far end");
    let file = yard.place.at("destinations.toml");
    let text = |program: &str| format!("[lab]\nhops = [\"{ssh} lab\", \"env X=y\"]\nfolder = {folder:?}\n{program}");
    std::fs::write(&file, text("")).unwrap();
    let at = ["--to", "lab", "--destinations", &file];
    let with = |args: &[&str]| -> Vec<String> { args.iter().chain(&at).map(|a| (*a).to_owned()).collect() };
    let call = |args: &[&str]| {
        let all = with(args);
        run(&all.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let (code, out, err) = call(&["deploy", &yard.config, "--dry-run"]);
    assert!(code == 0 && out.contains("would send") && out.contains("absent"), "{out}{err}");
    assert!(!Path::new(&folder).exists(), "a dry run writes nothing");
    let (code, _, err) = call(&["launch", &yard.config]);
    assert!(code == 3 && err.contains("nothing is deployed"), "{err}");
    let (code, out, err) = call(&["deploy", &yard.config]);
    assert!(code == 0 && out.contains("two steps of 256 tokens on cpu"), "{out}{err}");
    let (code, out, _) = call(&["deploy", &yard.config, "--dry-run"]);
    assert!(code == 0 && out.contains("would send 0 B in 0 files"), "{out}");

    std::fs::write(&file, text(&format!("program = {old:?}\n"))).unwrap();
    let (code, _, err) = call(&["deploy", &yard.config, "--no-smoke"]);
    assert!(code == 3 && err.contains("starts build older") && err.contains("older copy"), "{err}");
    std::fs::write(&file, text("")).unwrap();

    let (code, _, err) = call(&["deploy", &yard.config, "--verify"]);
    assert!(code == 3 && err.contains("no status"), "{err}");
    let (code, out, err) = call(&["launch", &yard.config]);
    assert!(code == 0 && out.contains("launched") && !out.contains("Welcome"), "{out}{err}");
    let (code, out, err) = call(&["deploy", &yard.config, "--verify"]);
    assert!(code == 0 && out.contains("the run is what is here"), "{out}{err}");
    let (code, _, err) = call(&["watch", "run", "--until", "step=20", "--timeout", "2m"]);
    assert_eq!(code, 0, "{err}");

    // A changed key is not in the run until it is deployed and the run restarted.
    let changed = std::fs::read_to_string(&yard.config).unwrap().replace("[optimizer]", "[optimizer]\nlr = 1e-3");
    std::fs::write(&yard.config, changed).unwrap();
    let (code, _, err) = call(&["deploy", &yard.config, "--verify"]);
    assert!(code == 3 && err.contains("the run does not contain your change: its config is"), "{err}");
    let (code, _, err) = call(&["deploy", &yard.config, "--no-smoke"]);
    assert_eq!(code, 0, "{err}");
    let (code, _, err) = call(&["watch", "run", "--until", "step=999999"]);
    assert!(code == 3 && err.contains("not your code"), "what runs is not what was deployed: {err}");
    let (code, out, err) = call(&["restart", "run", "--resume"]);
    assert!(code == 0 && out.contains("resumed after step"), "{out}{err}");
    let (code, _, err) = call(&["deploy", &yard.config, "--verify"]);
    assert_eq!(code, 0, "{err}");
    let (code, out, err) = call(&["stop", "run"]);
    assert!(code == 0 && out.contains("stopped"), "{out}{err}");
    let (code, _, err) = call(&["deploy", &yard.config, "--verify"]);
    assert!(code == 3 && err.contains("it was stopped"), "{err}");
}

/// A host behind a real sshd, and a container in it with its own mounts and process ids, entered with a `pct`-like command.
struct Lab {
    _dir: tempfile::TempDir,
    sshd: Child,
    container: Child,
    destinations: String,
    shared: PathBuf,
    enter: String,
}

impl Lab {
    /// Why it cannot be had, otherwise.
    fn new() -> Result<Lab, String> {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        let sshd = ["/usr/sbin/sshd", "/usr/bin/sshd"].into_iter().find(|p| Path::new(p).exists()).ok_or("there is no sshd")?;
        for key in ["hostkey", "key"] {
            let made = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f", &at(key)]).status();
            made.ok().filter(|s| s.success()).ok_or("there is no ssh-keygen")?;
        }
        std::fs::copy(at("key.pub"), at("authorized")).unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let conf = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nPidFile none\nUsePAM no\nPermitRootLogin yes\n",
            at("hostkey"),
            at("authorized")
        );
        std::fs::write(at("sshd_config"), conf).unwrap();
        let _ = std::fs::create_dir_all("/run/sshd");
        let user = String::from_utf8(Command::new("id").arg("-un").output().unwrap().stdout).unwrap();
        let client = format!(
            "Host lab\nHostName 127.0.0.1\nPort {port}\nUser {}\nIdentityFile {}\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\nBatchMode yes\n",
            user.trim(),
            at("key")
        );
        std::fs::write(at("ssh_config"), client).unwrap();
        let shared = dir.path().join("srv");
        std::fs::create_dir(&shared).unwrap();
        let inside = format!(
            "mount -t tmpfs -o size=900m tmpfs '{}' && touch '{0}/inside' && echo ready && exec sleep 600",
            shared.display()
        );
        let mut container = Command::new("unshare")
            .args(["-m", "-p", "-f", "--mount-proc", "--kill-child", "--propagation", "private", "sh", "-c", &inside])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| format!("there is no unshare: {e}"))?;
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(container.stdout.take().unwrap()), &mut line).unwrap();
        if line.trim() != "ready" {
            let _ = container.wait();
            return Err("nobody but root may mount here".into());
        }
        // The container's first process is the child of `unshare`.
        let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", container.id())).unwrap();
        let init = children.split_whitespace().next().unwrap().to_owned();
        let enter = script(
            &dir.path().join("pct"),
            &format!(
                "shift 3\nkill -0 {init} 2>/dev/null || {{ echo \"container '200' not running!\" >&2; exit 255; }}\nexec nsenter -t {init} -m -p -- \"$@\""
            ),
        );
        let mut sshd = Command::new(sshd).args(["-D", "-e", "-f", &at("sshd_config")]).stderr(Stdio::null()).spawn().unwrap();
        let hop = format!("ssh -F {} lab", at("ssh_config"));
        let mut answered = false;
        for _ in 0..50 {
            answered = Command::new("ssh")
                .args(["-F", &at("ssh_config"), "lab", "true"])
                .stderr(Stdio::null())
                .status()
                .is_ok_and(|s| s.success());
            if answered {
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let folder = shared.join("dh").display().to_string();
        let text = format!("[lab]\nhops = [{hop:?}, \"{enter} exec 200 --\"]\nfolder = {folder:?}\n");
        std::fs::write(at("destinations.toml"), text).unwrap();
        if !answered {
            let _ = (sshd.kill(), container.kill());
            let _ = (sshd.wait(), container.wait());
            return Err("sshd on loopback does not let this user in".into());
        }
        Ok(Lab { destinations: at("destinations.toml"), _dir: dir, sshd, container, shared, enter })
    }

    /// Runs a shell line inside.
    fn inside(&self, line: &str) -> String {
        let output = Command::new(&self.enter).args(["exec", "200", "--", "sh", "-c", line]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    fn call(&self, args: &[&str]) -> (i32, String, String) {
        let all: Vec<&str> = args.iter().copied().chain(["--to", "lab", "--destinations", &self.destinations]).collect();
        run(&all)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // With the container its processes end.
        for child in [&mut self.container, &mut self.sshd] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn through_a_real_sshd_into_a_container() {
    let lab = match Lab::new() {
        Ok(lab) => lab,
        Err(why) => {
            eprintln!("SKIPPED: {why}, so a real sshd and container were NOT tested; run as root with openssh-server installed");
            return;
        }
    };
    let yard = Yard::new();
    let (code, out, err) = lab.call(&["deploy", &yard.config, "--no-smoke"]);
    assert_eq!(code, 0, "{out}{err}");
    assert!(
        !lab.shared.join("inside").exists() && lab.inside(&format!("ls '{}'", lab.shared.display())).contains("dh"),
        "it landed inside"
    );
    let (code, out, err) = lab.call(&["launch", &yard.config]);
    assert!(code == 0 && out.contains("(session)"), "{out}{err}");

    // Killing every ssh of a watcher leaves the run alone, and the watcher comes back and goes on with the next event.
    let seen = yard.place.path("seen");
    let mut watcher = drafthorse()
        .args(["--json", "watch", "run", "--to", "lab", "--destinations", &lab.destinations])
        .stdout(std::fs::File::create(&seen).unwrap())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let numbers = || -> Vec<u64> {
        let text = std::fs::read_to_string(&seen).unwrap();
        let whole = text.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
        whole.filter_map(|frame| frame["event"]["seq"].as_u64()).collect()
    };
    let wait_beyond = |last: u64| {
        while numbers().last().is_none_or(|n| *n <= last) {
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    wait_beyond(0);
    for pid in children(watcher.id()) {
        Command::new("kill").args(["-9", &pid]).status().unwrap();
    }
    let (code, out, _) = lab.call(&["ps"]);
    assert!(code == 0 && out.contains("running"), "{out}");
    // What was on its way when the connection was cut comes in any case; what happened since then comes over a new one.
    std::thread::sleep(Duration::from_millis(300));
    wait_beyond(*numbers().last().unwrap());
    watcher.kill().unwrap();
    watcher.wait().unwrap();
    let numbers = numbers();
    assert!(numbers.windows(2).all(|w| w[1] == w[0] + 1), "nothing twice and nothing left out: {numbers:?}");

    // A file on the host is not what runs.
    let fixed = lab.shared.join("dh");
    std::fs::create_dir(&fixed).unwrap();
    let other = yard.place.path("other build");
    std::fs::copy(env!("CARGO_BIN_EXE_drafthorse"), &other).unwrap();
    std::fs::OpenOptions::new()
        .append(true)
        .open(&other)
        .map(|mut f| std::io::Write::write_all(&mut f, b"changed"))
        .unwrap()
        .unwrap();
    std::fs::copy(&other, fixed.join("drafthorse")).unwrap();
    let binary = other.display().to_string();
    let (code, _, err) = lab.call(&["deploy", &yard.config, "--verify", "--binary", &binary]);
    assert!(code == 3 && err.contains("not where the program runs") && err.contains("wrong filesystem"), "{err}");
    std::fs::remove_dir_all(&fixed).unwrap();
    let (code, _, err) = lab.call(&["deploy", &yard.config, "--verify", "--binary", &binary]);
    assert!(code == 3 && err.contains("the run does not contain your change: its program"), "{err}");

    // The changed program goes through the chain, the run goes on with it.
    let (code, _, err) = lab.call(&["deploy", &yard.config, "--no-smoke", "--binary", &binary]);
    assert_eq!(code, 0, "{err}");
    let (code, out, err) = lab.call(&["restart", "run", "--resume"]);
    assert!(code == 0 && out.contains("resumed after step"), "{out}{err}");
    let (code, _, err) = lab.call(&["deploy", &yard.config, "--verify", "--binary", &binary]);
    assert_eq!(code, 0, "{err}");

    // A stopped container is said, by its hop.
    let (code, out, err) = lab.call(&["stop", "run"]);
    assert_eq!(code, 0, "{out}{err}");
    let mut lab = lab;
    lab.container.kill().unwrap();
    lab.container.wait().unwrap();
    let (code, _, err) = lab.call(&["ps"]);
    // In whose words, the container's command or its entrance's, depends on how far the container is gone.
    assert!(code == 5 && err.contains("hop 2 of 2") && err.contains("does not lead on"), "{err}");
}

/// Children of all threads of a process.
fn children(pid: u32) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|t| std::fs::read_to_string(t.path().join("children")).ok());
    lists.flat_map(|l| l.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).collect()
}
