//! `drafthorse deploy`: put program, config and data where a run is to live, and prove that they are there.
//!
//! Refuses to send anything before the far end has been looked at. Invariants: everything goes through the chain that will run it and is hashed at its end;
//! the deployed program has run there, with the deployed config, before this command says that it is done.

use crate::build_id::BUILD_ID;
use crate::deployment::{Deployed, Deployment, config_there, hash_cache, program_there, record_there, run_name};
use crate::exit::{Exit, Failure};
use crate::format::bytes;
use crate::place::{Place, runs_there};
use crate::progress::Progress;
use crate::screen::Screen;
use clap::Args;
use drafthorse_data::sha256_hex;
use drafthorse_remote::RemoteError;
use drafthorse_remote::destination::Destination;
use drafthorse_remote::far::{Far, Input};
use drafthorse_remote::files::sha256_file;
use drafthorse_remote::probe::{Probe, fits, needs, probe};
use drafthorse_remote::transfer::{Item, There, inventory, put};
use drafthorse_remote::verify::{Meant, entry, look_on_the_way, verify};
use drafthorse_train::config::RunConfig;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Put program, config and data at a destination, and prove that they are there
///
/// Looks first (hops, disk, architecture, glibc, driver), sends what differs through the same chain that will run it, hashes everything at the far end,
/// asks the program there who it is, checks the config there, and trains two steps. An interrupted transfer goes on where it was cut.
/// With --verify nothing is sent: the running job is compared with what is here.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  drafthorse deploy run.toml --to lab --dry-run        # look and compare, send nothing
  drafthorse deploy run.toml --to lab
  drafthorse deploy run.toml --hop 'ssh root@host' --hop 'pct exec 200 --' --folder /root/drafthorse
  drafthorse deploy run.toml --to lab --verify         # does what runs there contain my change?

A destinations file:
  [lab]
  hops = [\"ssh root@host\", \"pct exec 200 --\"]
  folder = \"/root/drafthorse\"
  gpus = [0, 1]
  env = { HF_HOME = \"/data/hf\" }
  paths = { \"Qwen/Qwen3-8B\" = \"/models/Qwen3-8B\" }     # there already: not sent")]
pub struct Deploy {
    /// Run config
    config: PathBuf,
    /// Overrides, e.g. drafter.layers=3
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    #[command(flatten)]
    place: Place,
    /// Program to deploy [default: this one]
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// Look and compare; send nothing
    #[arg(long)]
    dry_run: bool,
    /// Compare the running job with what is here; send nothing
    #[arg(long, conflicts_with = "dry_run")]
    verify: bool,
    /// Hash everything at the far end anew, also what has not changed since it was last hashed
    #[arg(long)]
    rehash: bool,
    /// Do not train two steps there
    #[arg(long)]
    no_smoke: bool,
}

/// A program here.
struct Program {
    path: PathBuf,
    sha256: String,
    build_id: String,
}

#[derive(Serialize)]
struct Row {
    file: String,
    size_bytes: u64,
    local_sha256: String,
    remote_sha256: Option<String>,
    state: &'static str,
    path: String,
}

#[derive(Serialize)]
struct Report<'a> {
    place: String,
    name: &'a str,
    build_id: &'a str,
    config_hash: String,
    probe: &'a Probe,
    files: &'a [Row],
    referenced: &'a [(String, String)],
    sent_bytes: u64,
    smoke: &'a str,
}

/// Runs the command.
pub fn run(args: &Deploy, screen: Screen) -> Result<Exit, Failure> {
    let to = args.place.required()?;
    let far = to.far();
    let program = program(args.binary.as_deref())?;
    let mut cache = hash_cache();
    let plan = Deployment::plan(&args.config, &args.overrides, &to, &mut cache)?;
    if args.verify {
        return compare(&far, &to, &plan, &program, &args.place, screen);
    }
    let seen = probe(&far, &to.folder)?;
    screen.note(look_text(&far, &seen));
    fits(&far, &seen, &needs(&program.path)?, plan.config.pipeline.device == "cuda")?;
    if !seen.writable {
        let what = format!("{} on {} cannot be written", seen.nearest_folder, far.place());
        return Err(Failure::new(Exit::BadInput, what, format!("make {} writable there, or choose another folder", to.folder)));
    }
    let mut items = vec![Item {
        what: "program".into(),
        size_bytes: std::fs::metadata(&program.path).map_err(|e| Failure::file("look at", &program.path, &e))?.len(),
        local: program.path.clone(),
        sha256: program.sha256.clone(),
        to: program_there(&to, &program.sha256),
        executable: true,
    }];
    items.extend(plan.files.iter().cloned());
    // The config is text made here; it goes by a file, so that it travels and is hashed like the others.
    let scratch = tempfile::NamedTempFile::new().map_err(|e| Failure::file("make a file in", &std::env::temp_dir(), &e))?;
    let text = plan.config.to_toml();
    std::fs::write(scratch.path(), &text).map_err(|e| Failure::file("write", scratch.path(), &e))?;
    items.push(Item {
        what: "config".into(),
        local: scratch.path().to_owned(),
        size_bytes: text.len() as u64,
        sha256: sha256_hex(text.as_bytes()),
        to: config_there(&to, &plan.name),
        executable: false,
    });
    let there = if seen.nearest_folder == to.folder { look(&far, &to, &items, args.rehash)? } else { vec![None; items.len()] };
    let missing: Vec<&Item> = items.iter().zip(&there).filter(|(i, t)| !is_same(i, t)).map(|(i, _)| i).collect();
    let need_bytes: u64 = missing.iter().map(|i| i.size_bytes).sum();
    if let Some(free_bytes) = seen.free_bytes.filter(|f| *f < need_bytes) {
        return Err(RemoteError::NoSpace { place: far.place(), folder: to.folder.clone(), free_bytes, need_bytes }.into());
    }
    for (here, place) in &plan.referenced {
        far.must(
            &format!("looking for {place}"),
            r#"[ -e "$1" ]"#,
            &[place],
            "correct `paths` of the destination, or remove the line",
        )?;
        screen.note(format!("{here} is {place} there and is not sent"));
    }
    if args.dry_run {
        let rows = rows(&items, &there, true);
        screen.say(table(&rows))?;
        screen.say(format!("would send {} in {} files to {}", bytes(need_bytes), missing.len(), far.place()))?;
        report(&far, &plan, &program, &seen, &rows, need_bytes, "not run", screen)?;
        return Ok(Exit::Done);
    }
    send(&far, &to, &missing, need_bytes, screen)?;
    let after = look(&far, &to, &items, args.rehash)?;
    for (item, there) in items.iter().zip(&after) {
        let theirs = there.as_ref().map_or_else(|| "nothing".to_owned(), |(_, h)| h.clone());
        if theirs != item.sha256 {
            let (file, ours) = (item.what.clone(), item.sha256.clone());
            return Err(RemoteError::WrongHash { place: far.place(), file, ours, theirs }.into());
        }
    }
    let build_id = entry(&far, &program_there(&to, &program.sha256), &program.build_id)?;
    let program = Program { build_id, ..program };
    activate(&far, &to, &plan, &program)?;
    let smoke = prove(&far, &to, &plan, &program, args.no_smoke, screen)?;
    let rows = rows(&items, &there, false);
    screen.say(table(&rows))?;
    screen.say(format!("deployed   {} as {} on {}", program.build_id, plan.name, far.place()))?;
    screen.say(format!("smoke      {smoke}"))?;
    let words = args.place.words();
    screen.say(format!(
        "next: drafthorse launch {0}{words}   or, if it runs already: drafthorse restart {1} --resume{words}",
        args.config.display(),
        plan.name
    ))?;
    report(&far, &plan, &program, &seen, &rows, need_bytes, &smoke, screen)?;
    Ok(Exit::Done)
}

/// The program to deploy, which says itself who it is.
fn program(binary: Option<&Path>) -> Result<Program, Failure> {
    let Some(path) = binary else {
        let path = std::env::current_exe().map_err(|e| Failure::file("find", Path::new("/proc/self/exe"), &e))?;
        return Ok(Program { sha256: sha256_file(&path)?, path, build_id: BUILD_ID.into() });
    };
    // A program for another kind of machine cannot be asked here; it is asked there.
    let said = Command::new(path)
        .args(["version", "--json"])
        .output()
        .ok()
        .and_then(|o| serde_json::from_slice::<serde_json::Value>(&o.stdout).ok());
    let build_id = said.and_then(|v| v["build_id"].as_str().map(str::to_owned)).unwrap_or_default();
    Ok(Program { sha256: sha256_file(path)?, path: path.to_owned(), build_id })
}

fn is_same(item: &Item, there: &There) -> bool {
    there.as_ref().is_some_and(|(_, hash)| *hash == item.sha256)
}

/// What the far end has, hashed there: program and config anew, the rest from memory where it has not changed.
fn look(far: &Far, to: &Destination, items: &[Item], rehash: bool) -> Result<Vec<There>, Failure> {
    let large = |item: &&Item| item.what.contains(": ");
    let paths = |list: Vec<&Item>| list.into_iter().map(|i| i.to.clone()).collect::<Vec<_>>();
    let mut old = inventory(far, &to.folder, &paths(items.iter().filter(large).collect()), !rehash)?.into_iter();
    let mut new = inventory(far, &to.folder, &paths(items.iter().filter(|i| !large(i)).collect()), false)?.into_iter();
    Ok(items.iter().map(|i| if large(&i) { old.next() } else { new.next() }.flatten()).collect())
}

fn send(far: &Far, to: &Destination, missing: &[&Item], need_bytes: u64, screen: Screen) -> Result<(), Failure> {
    let progress = Progress::new(screen, "send");
    let mut gone = 0;
    for item in missing {
        let kept = put(far, &to.folder, item, &|n| {
            progress.update(gone + n, need_bytes, || format!("{}, {}", item.what, bytes(gone + n)))
        })?;
        if kept > 0 {
            progress.line(&format!("{}: {} were there from an interrupted transfer", item.what, bytes(kept)));
        }
        gone += item.size_bytes;
    }
    Ok(())
}

/// Makes the deployed program and config the ones that commands there use.
fn activate(far: &Far, to: &Destination, plan: &Deployment, program: &Program) -> Result<(), Failure> {
    let permissions = "check the folder's permissions there";
    // The far end's clock is the one by which its runs tell when they started.
    let seconds = far.must("asking for the time", "date +%s", &[], "install coreutils (or busybox) there")?;
    let record = Deployed {
        name: plan.name.clone(),
        build_id: program.build_id.clone(),
        program_sha256: program.sha256.clone(),
        config_hash: plan.config_hash(),
        deployed_t: 1000 * seconds.trim().parse::<u64>().unwrap_or(0),
    };
    let text = serde_json::to_string(&record).expect("a record is plain data");
    let script = r#"mkdir -p "$1/runs" && printf '%s\n' "$4" > "$3.new" && mv -f "$3.new" "$3" &&
ln -sf "$2" "$1/.drafthorse.new" && mv -f "$1/.drafthorse.new" "$1/drafthorse""#;
    let there = program_there(to, &program.sha256);
    far.must("making it current", script, &[&to.folder, &there, &record_there(to, &plan.name), &text], permissions)?;
    Ok(())
}

/// The program there says who it is, reads the config as we do, and trains two steps. Gives what the smoke did, in words.
fn prove(
    far: &Far,
    to: &Destination,
    plan: &Deployment,
    program: &Program,
    no_smoke: bool,
    screen: Screen,
) -> Result<String, Failure> {
    let start = to.program();
    entry(far, &start, &program.build_id)?;
    let config = config_there(to, &plan.name);
    let dry = r#"cd "$1" && exec "$2" --json --quiet train "$3" name=deploy-check --dry-run"#;
    let out =
        far.must("checking the config there", dry, &[&to.folder, &start, &config], "mend what it says, then deploy again")?;
    // The name of the check is in the hash that it prints, so that ours is of the same config.
    let mut checked = plan.config.clone();
    checked.name = Some("deploy-check".into());
    let expected = crate::launch::config_hash(&checked);
    let said: serde_json::Value = serde_json::from_str(&out).unwrap_or_default();
    let found = said["config_hash"].as_str().unwrap_or_default().to_owned();
    if found != expected {
        return Err(RemoteError::OtherConfig { place: far.place(), found, expected }.into());
    }
    if no_smoke {
        return Ok("not run, as asked".into());
    }
    smoke(far, to, plan, program, screen)
}

/// The far doctor, and two steps of a small batch; both on the CPU if a run there holds the GPUs.
fn smoke(far: &Far, to: &Destination, plan: &Deployment, program: &Program, screen: Screen) -> Result<String, Failure> {
    let start = &to.program();
    let mut device = plan.config.pipeline.device.clone();
    if device == "cuda" {
        let ask = r#"cd "$1" && exec "$2" --json ps --runs "$1/runs""#;
        let busy = far.must("asking for runs there", ask, &[&to.folder, start], "run it there by hand")?;
        let list: serde_json::Value = serde_json::from_str(&busy).unwrap_or_default();
        if list.as_array().is_some_and(|l| l.iter().any(|r| !r["pid"].is_null())) {
            screen.note("a run there holds GPUs, so doctor and the two steps run on the CPU");
            device = "cpu".into();
        }
    }
    // What a program found well on a device stays so until the program or the machine changes.
    let doctor = r#"cd "$1" || exit 1
was=$(cat "$4" 2>/dev/null); now="$3 $(cat /proc/sys/kernel/random/boot_id 2>/dev/null)"
[ "$was" = "$now" ] && { echo "it found this machine well before"; exit 0; }
if [ "$3" = cpu ]; then "$2" doctor --device cpu; else "$2" doctor; fi
code=$?; [ $code = 0 ] && printf '%s\n' "$now" > "$4"; exit $code"#;
    let well = format!("{}.well", program_there(to, &program.sha256));
    let answer = far.script("running doctor there", doctor, &[&to.folder, start, &device, &well], Input::Nothing)?;
    if answer.code != 0 {
        let failed: Vec<&str> = answer.out.lines().filter(|l| l.starts_with("FAIL")).collect();
        let said = if failed.is_empty() { answer.said() } else { failed.join("; ") };
        let todo = "mend what it names there, then deploy again".to_owned();
        return Err(RemoteError::Failed { place: far.place(), doing: "doctor".into(), code: answer.code, said, todo }.into());
    }
    screen.note(format!("doctor there: {}", answer.out.trim().lines().last().unwrap_or_default()));
    let budget = plan.config.batch.token_budget.min(1024);
    let micro = plan.config.batch.micro_blocks.min(32);
    let script = r#"cd "$1" || exit 1
s="$1/.smoke"; rm -rf "$s"
"$2" train "$3" "out=$s" name=smoke optimizer.steps=2 optimizer.global_batch=1 eval.every=0 checkpoint.every=0 batch.cut_long=true \
  "batch.token_budget=$4" "batch.micro_blocks=$5" "pipeline.device=$6"
code=$?; rm -rf "$s"; exit $code"#;
    let numbers = [budget.to_string(), micro.to_string()];
    let config = config_there(to, &plan.name);
    let answer = far.script(
        "training two steps",
        script,
        &[&to.folder, start, &config, &numbers[0], &numbers[1], &device],
        Input::Nothing,
    )?;
    match answer.code {
        0 => Ok(format!("two steps of {budget} tokens on {device}")),
        4 if device == "cpu" && plan.config.pipeline.device != "cpu" => {
            Ok(format!("SKIPPED: the target does not fit the CPU's memory there, so no step was trained ({})", answer.said()))
        }
        code => {
            let said = answer.said();
            let todo = "mend what it says, then deploy again; a run that goes on there was not touched".to_owned();
            Err(RemoteError::Failed { place: far.place(), doing: "training two steps".into(), code, said, todo }.into())
        }
    }
}

fn rows(items: &[Item], before: &[There], dry: bool) -> Vec<Row> {
    let row = |(item, before): (&Item, &There)| {
        let same = is_same(item, before);
        let state = match (same, before.is_some(), dry) {
            (true, ..) => "same",
            (false, true, true) => "differs",
            (false, false, true) => "absent",
            (false, ..) => "sent",
        };
        let remote_sha256 = if dry { before.as_ref().map(|(_, h)| h.clone()) } else { Some(item.sha256.clone()) };
        Row {
            file: item.what.clone(),
            size_bytes: item.size_bytes,
            local_sha256: item.sha256.clone(),
            remote_sha256,
            state,
            path: item.to.clone(),
        }
    };
    items.iter().zip(before).map(row).collect()
}

fn table(rows: &[Row]) -> String {
    let width = rows.iter().map(|r| r.file.chars().count()).max().unwrap_or(0).max(4);
    let mut lines =
        vec![format!("{:<width$}  {:>9}  {:<12}  {:<12}  {:<7}  where", "file", "size", "hash here", "hash there", "state")];
    lines.extend(rows.iter().map(|r| {
        let there = r.remote_sha256.as_deref().unwrap_or("-");
        format!(
            "{:<width$}  {:>9}  {:.12}  {there:<12.12}  {:<7}  {}",
            r.file,
            bytes(r.size_bytes),
            r.local_sha256,
            r.state,
            r.path
        )
    }));
    lines.join("\n")
}

fn look_text(far: &Far, seen: &Probe) -> String {
    let or = |v: &Option<String>| v.clone().unwrap_or_else(|| "unknown".into());
    let size = |v: Option<u64>| v.map_or_else(|| "unknown".into(), bytes);
    let gpus = match (&seen.driver, seen.gpus.len()) {
        (_, n) if n > 0 => format!("{n} × {}", seen.gpus[0].name),
        (Some(driver), _) => driver.clone(),
        (None, _) => "no GPU".into(),
    };
    format!(
        "{}: host {}, {} {}, {}, {} of disk and {} of memory free, {gpus}",
        far.place(),
        or(&seen.host),
        or(&seen.system),
        or(&seen.machine),
        or(&seen.libc),
        size(seen.free_bytes),
        size(seen.memory_bytes)
    )
}

#[allow(clippy::too_many_arguments, reason = "one call, one report")]
fn report(
    far: &Far,
    plan: &Deployment,
    program: &Program,
    seen: &Probe,
    rows: &[Row],
    sent_bytes: u64,
    smoke: &str,
    screen: Screen,
) -> Result<(), Failure> {
    screen.json(&Report {
        place: far.place(),
        name: &plan.name,
        build_id: &program.build_id,
        config_hash: plan.config_hash(),
        probe: seen,
        files: rows,
        referenced: &plan.referenced,
        sent_bytes,
        smoke,
    })
}

/// What was deployed for a run, by the record there; none if nothing was.
pub fn deployed(to: &Destination, name: &str) -> Result<Option<Deployed>, Failure> {
    let answer =
        to.far().script("reading what was deployed", r#"cat "$1" 2>/dev/null"#, &[&record_there(to, name)], Input::Nothing)?;
    Ok(serde_json::from_str(&answer.out).ok())
}

fn compare(
    far: &Far,
    to: &Destination,
    plan: &Deployment,
    program: &Program,
    place: &Place,
    screen: Screen,
) -> Result<Exit, Failure> {
    let record = deployed(to, &plan.name)?;
    let meant = Meant {
        build_id: program.build_id.clone(),
        program_sha256: program.sha256.clone(),
        config_hash: Some(plan.config_hash()),
        deployed_t: record.as_ref().map(|r| r.deployed_t),
    };
    let run_dir = format!("{}/{}", runs_there(to), plan.name);
    let seen = verify(far, &run_dir, &meant)?;
    let mark = |equal: bool| if equal { "equal" } else { "DIFFERS" };
    screen.say(format!(
        "run {} on {}: process {} on host {}, step {}",
        plan.name,
        far.place(),
        seen.pid,
        seen.host,
        seen.step.unwrap_or(0)
    ))?;
    for line in &seen.lines {
        screen.say(format!(
            "{:<18}  here {:<28.28}  there {:<28.28}  {}",
            line.what,
            line.ours,
            line.theirs,
            mark(line.equal)
        ))?;
    }
    screen.json(&seen)?;
    if let Err(difference) = seen.check(&plan.name) {
        // Why it differs is often that the file lies one filesystem too far out.
        look_on_the_way(far, &to.program(), &program.sha256)?;
        // It was deployed, and yet something else runs: perhaps what starts it there names an older copy.
        if record.is_some_and(|r| r.program_sha256 == program.sha256) {
            entry(far, &to.program(), &program.build_id)?;
        }
        return Err(difference.into());
    }
    screen.say(format!("the run is what is here; watch it with: drafthorse watch {}{}", plan.name, place.words()))?;
    Ok(Exit::Done)
}

/// The name under which `path` is deployed, and whether what lies there is what it would be now.
pub fn is_deployed(path: &Path, overrides: &[String], to: &Destination) -> Result<String, Failure> {
    let config = RunConfig::load(path, overrides)?;
    let name = run_name(&config, path);
    let plan = Deployment::plan(path, overrides, to, &mut hash_cache())?;
    match deployed(to, &name)? {
        None => {
            let what = format!("nothing is deployed for run `{name}` on {}", to.hops);
            Err(Failure::new(Exit::BadInput, what, "deploy it first: drafthorse deploy CONFIG --to NAME"))
        }
        Some(record) if record.config_hash != plan.config_hash() => {
            let what = format!("{} has changed since it was deployed to {}", path.display(), to.hops);
            Err(Failure::new(Exit::BadInput, what, "deploy it again, then launch"))
        }
        Some(_) => Ok(name),
    }
}
