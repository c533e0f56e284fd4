//! A supervised trainer: crashes, limits, stops, stale locks, ids given again. Trainers are shell scripts that write the status a real one would.

use drafthorse_remote::RemoteError;
use drafthorse_remote::launches::{Attempt, Ended, LaunchDir, Launches, State, Wanted};
use drafthorse_remote::process::ProcessId;
use drafthorse_remote::restart::ps;
use drafthorse_remote::stop::{Patience, stop};
use drafthorse_remote::supervise::{Codes, supervise};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

const CODES: Codes = Codes {
    meaning: |code| format!("meaning {code}"),
    is_done: |code| code == 0,
    is_stopped: |code| code == 8,
    is_crash: |code| code == 70 || code == 5,
};

/// What a trainer script can call: `step N` writes a status with a checkpoint after step N, from this very process.
const HELPERS: &str = r#"out=$(dirname "$0")/runs/r; mkdir -p "$out"
step() { printf '{"v":1,"t":%s,"run_id":"x","seq":1,"verdict":{"state":"healthy","headline":"","advice":""},"identity":{"build_id":"b","config_hash":"c","dataset_hash":"","command_line":[],"host":"h","pid":%s,"started_t":%s,"backend":"cpu"},"phases":[],"gate_t":1,"plan":null,"total_steps":9,"step":{"step":%s,"epoch":0,"batch":0,"loss":1.0,"lr":1.0,"grad_norm":1.0,"accuracy":[],"expected_acceptance":1.0,"tokens":1,"tokens_per_s":1.0,"step_ms":1.0,"rows":1,"blocks":1,"non_finite_skipped":0},"variants":[],"totals":{"steps":1,"tokens":1,"rows":1,"blocks":1,"non_finite_skipped":0,"warnings":0},"rates":{"tokens_per_s":1.0,"step_ms":1.0,"longest_step_ms":1.0,"remaining_s":null},"loss_trend":{"average":1.0,"lowest":null,"samples":1,"non_finite_in_a_row":0},"progress":1,"last_progress_t":1,"stages":[],"channels":[],"slots":[],"held_out":null,"best_held_out":null,"checkpoint":{"step":%s,"path":"p","role":"latest","size_bytes":1,"elapsed_s":0.0},"export":null,"gpus":[],"warnings":[],"outcome":null,"telemetry":{"written_events":0,"dropped_events":0,"unwritten_events":0,"failed_writes":0,"last_error":null,"status_interval_ms":500}}' "$(date +%s%3N)" "$$" "$(date +%s%3N)" "$1" "$1" > "$out/status.json"; }
n=$(cat "$out/n" 2>/dev/null || echo 0); n=$((n + 1)); echo $n > "$out/n"
"#;

struct Place {
    dir: tempfile::TempDir,
    launches: Launches,
}

impl Place {
    fn new(trainer: &str) -> (Place, LaunchDir) {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("trainer");
        std::fs::write(
            &program,
            format!("#!/bin/sh\n{HELPERS}\n{trainer}\n").replace("$(dirname \"$0\")", &dir.path().display().to_string()),
        )
        .unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let launches = Launches::new(dir.path().join("runs"));
        let place = Place { dir, launches };
        let launch = place.launches.create(place.wanted()).unwrap();
        (place, launch)
    }

    fn wanted(&self) -> Wanted {
        Wanted {
            name: "r".into(),
            program: self.dir.path().join("trainer"),
            build_id: "b".into(),
            config: String::new(),
            args: vec!["name=r".into()],
            resume: false,
            restarts: 2,
            backoff_ms: 10,
            previous: None,
            fall_back: false,
        }
    }

    fn state_of(&self) -> &'static str {
        ps(&self.launches).unwrap().pop().unwrap().state
    }
}

fn reasons(state: &State) -> Vec<&str> {
    state.attempts.iter().map(|a| a.reason.as_deref().unwrap()).collect()
}

fn wait_for_step(launch: &LaunchDir) {
    while launch.status().unwrap().is_none_or(|s| s.step.is_none()) {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_crash_is_started_again_from_its_checkpoint_and_every_reason_is_kept() {
    let (place, launch) = Place::new(
        "echo \"args $*\"; step $n; case $n in 1) kill -9 $$;; 2) echo 'error: the device is gone' >&2; exit 5;; esac; exit 0",
    );
    let state = supervise(&launch, &CODES).unwrap();
    assert_eq!(state.ended, Some(Ended::Done));
    let told = reasons(&state);
    assert!(
        told[0].contains("signal 9") && told[1].contains("exit 5, meaning 5: the device is gone") && told[2].contains("exit 0"),
        "{told:?}"
    );
    let log = std::fs::read_to_string(launch.log()).unwrap();
    let args: Vec<&str> = log.lines().filter(|l| l.starts_with("args ")).collect();
    assert_eq!(args.len(), 3);
    assert!(!args[0].contains("--resume") && args[1].ends_with("name=r --resume auto"), "{args:?}");
    assert_eq!(place.state_of(), "done");
}

#[test]
fn crashes_without_a_new_checkpoint_are_given_up_and_progress_resets_the_count() {
    let (place, launch) = Place::new("step $((n < 3 ? n : 3)); exit 70");
    let state = supervise(&launch, &CODES).unwrap();
    assert_eq!(state.ended, Some(Ended::GivenUp));
    // Steps 1, 2, 3 are new checkpoints; after the third, two restarts bring nothing new.
    assert_eq!(state.attempts.len(), 5, "{:?}", reasons(&state));
    assert_eq!(place.state_of(), "given up");
}

#[test]
fn what_another_attempt_would_not_mend_is_not_started_again() {
    for (trainer, word) in
        [("exit 3", "exit 3"), ("echo 'error: no such file' >&2; exit 70", "no such file"), ("step 1; exit 6", "exit 6")]
    {
        let (place, launch) = Place::new(trainer);
        let state = supervise(&launch, &CODES).unwrap();
        assert_eq!((state.ended, state.attempts.len()), (Some(Ended::Failed), 1), "{trainer}");
        assert!(reasons(&state)[0].contains(word), "{:?}", reasons(&state));
        assert_eq!(place.state_of(), "failed");
    }
}

/// Supervises on another thread and calls `then` when the trainer has done a step.
fn while_running(trainer: &str, then: impl FnOnce(&Place, &LaunchDir)) -> State {
    let (place, launch) = Place::new(trainer);
    std::thread::scope(|scope| {
        let supervisor = scope.spawn(|| supervise(&launch, &CODES));
        wait_for_step(&launch);
        then(&place, &launch);
        supervisor.join().unwrap().unwrap()
    })
}

fn quick() -> Patience {
    Patience { save: Duration::from_millis(300), abort: Duration::from_millis(300), memory: Duration::ZERO }
}

#[test]
fn a_stop_asks_first() {
    let state = while_running("trap 'echo saved; exit 8' TERM; step 4; while :; do sleep 0.02; done", |place, launch| {
        assert_eq!(place.state_of(), "running");
        let busy = place.launches.create(place.wanted()).unwrap_err();
        assert!(matches!(busy, RemoteError::Busy { .. }), "{busy}");
        let twice = supervise(launch, &CODES).unwrap_err();
        assert!(twice.to_string().contains("looked after by another process"), "{twice}");
        let stopped = stop(launch, Patience { save: Duration::from_secs(60), ..quick() }, &mut |_| {}).unwrap();
        assert_eq!((stopped.was_running, stopped.forced, stopped.step), (true, false, Some(4)));
        assert_eq!(place.state_of(), "stopped");
    });
    assert_eq!((state.ended, state.attempts.len(), state.attempts[0].code), (Some(Ended::Stopped), 1, Some(8)));
}

#[test]
fn a_trainer_that_does_not_listen_is_killed_and_no_one_else() {
    let mut said = Vec::new();
    let state = while_running("trap '' TERM; step 1; while :; do sleep 0.02; done", |_, launch| {
        assert!(stop(launch, quick(), &mut |s| said.push(s)).unwrap().forced);
    });
    assert_eq!((state.ended, state.attempts[0].signal), (Some(Ended::Stopped), Some(9)));
    assert_eq!(said.iter().map(|s| s.contains("killed")).collect::<Vec<_>>(), [false, false, true], "{said:?}");
}

#[test]
fn a_stop_while_a_restart_is_waited_for_ends_the_launch() {
    let (place, launch) = Place::new("step 1; exit 5");
    let slow = Launches::new(place.dir.path().join("runs"));
    drop(launch);
    let launch = slow.create(Wanted { backoff_ms: 600_000, ..place.wanted() }).unwrap();
    let state = std::thread::scope(|scope| {
        let supervisor = scope.spawn(|| supervise(&launch, &CODES).unwrap());
        while launch.state().unwrap().is_none_or(|s| s.next_t.is_none()) {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(place.state_of(), "starting again");
        stop(&launch, Patience { save: Duration::from_secs(60), ..quick() }, &mut |_| {}).unwrap();
        supervisor.join().unwrap()
    });
    assert_eq!((state.ended, state.attempts.len()), (Some(Ended::Stopped), 1));
}

#[test]
fn a_lock_file_without_its_holder_is_no_lock_and_an_id_given_again_is_left_alone() {
    let (place, launch) = Place::new("exit 0");
    let mut stranger = Command::new("sleep").arg("60").spawn().unwrap();
    let theirs = ProcessId::of(stranger.id()).unwrap();
    let ours = ProcessId { start_ticks: theirs.start_ticks - 1, ..theirs.clone() };
    // What a machine that went down in the middle leaves behind: a lock file, a state that says "running", and the id now another's.
    let attempt =
        Attempt { trainer: ours.clone(), started_t: 1, ended_t: None, code: None, signal: None, reason: None, step: None };
    let state = State { supervisor: ours, attempts: vec![attempt], next_t: None, ended: None, put_back: None };
    std::fs::write(launch.path().join("state.json"), serde_json::to_vec(&state).unwrap()).unwrap();
    std::fs::write(launch.path().join("lock"), "4242").unwrap();
    assert!(!launch.is_supervised().unwrap());
    assert_eq!(place.state_of(), "lost");
    let stopped = stop(&launch, quick(), &mut |_| {}).unwrap();
    assert!(!stopped.was_running && theirs.is_alive());
    place.launches.create(place.wanted()).expect("the name is free");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}

#[test]
fn a_trainer_outlives_its_supervisor_and_can_still_be_stopped() {
    let (place, launch) = Place::new("trap 'exit 8' TERM; step 1; while :; do sleep 0.02; done");
    // The supervisor died: its lock is free, its trainer runs.
    let launch_record = launch.launch().unwrap();
    let mut trainer = Command::new(&launch_record.program).spawn().unwrap();
    let id = ProcessId::of(trainer.id()).unwrap();
    let attempt =
        Attempt { trainer: id.clone(), started_t: 1, ended_t: None, code: None, signal: None, reason: None, step: None };
    let state = State { supervisor: id.clone(), attempts: vec![attempt], next_t: None, ended: None, put_back: None };
    std::fs::write(launch.path().join("state.json"), serde_json::to_vec(&state).unwrap()).unwrap();
    wait_for_step(&launch);
    assert_eq!(place.state_of(), "unsupervised");
    let reaper = std::thread::spawn(move || trainer.wait().unwrap());
    let stopped = stop(&launch, Patience { save: Duration::from_secs(60), ..quick() }, &mut |_| {}).unwrap();
    assert!(stopped.was_running && !stopped.forced && !id.is_alive());
    assert_eq!(reaper.join().unwrap().code(), Some(8));
}
