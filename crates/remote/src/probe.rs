//! A look at the far end before anything is sent.
//!
//! Job: tools, architecture, C library, disk, memory, driver and GPUs there; what a binary here needs. Refuses to write anything there. Invariant: what
//! could not be found out is `None`, never a guess.

use crate::error::RemoteError;
use crate::far::{Far, Input};
use drafthorse_telemetry::{GpuSample, parse_gpus};
use serde::Serialize;
use std::path::Path;

/// Tools that deploying needs besides sh.
const TOOLS: &str = "cat sha256sum mkdir mv chmod rm ln wc df uname";
/// Words that arrive as they were sent, or something on the way is no POSIX shell.
const NASTY: &str = "a b  'c' \"d\" $HOME `e` \\ * ! {f,g} ~ ü";

const SCRIPT: &str = r#"printf 'args=%s\n' "$2"
for t in $3; do command -v "$t" >/dev/null 2>&1 || echo "missing=$t"; done
d=$1
while [ ! -d "$d" ]; do case $d in */*) d=${d%/*}; [ -n "$d" ] || d=/ ;; *) d=. ;; esac; done
echo "parent=$d"
[ -w "$d" ] && echo writable=yes
df -Pk "$d" 2>/dev/null | while read -r fs size used free rest; do echo "free=$free"; done
echo "machine=$(uname -m 2>/dev/null)"
echo "system=$(uname -s 2>/dev/null)"
libc=$(getconf GNU_LIBC_VERSION 2>/dev/null || ldd --version 2>&1)
echo "libc=${libc%%
*}"
[ -r /proc/sys/kernel/hostname ] && echo "host=$(cat /proc/sys/kernel/hostname)"
[ -r /proc/meminfo ] && while read -r k v u; do [ "$k" = MemAvailable: ] && echo "memory=$v"; done < /proc/meminfo
[ -r /proc/driver/nvidia/version ] && { read -r v < /proc/driver/nvidia/version; echo "driver=$v"; }
nvidia-smi --query-gpu=index,name,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu --format=csv,noheader,nounits 2>/dev/null | while read -r l; do echo "gpu=$l"; done
exit 0"#;

/// What is there.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Probe {
    /// Host name as seen from inside.
    pub host: Option<String>,
    /// `uname -s`.
    pub system: Option<String>,
    /// `uname -m`.
    pub machine: Option<String>,
    /// The C library's own words.
    pub libc: Option<String>,
    /// Version of glibc, e.g. `2.36`.
    pub glibc: Option<String>,
    /// Bytes free where the folder is or would be.
    pub free_bytes: Option<u64>,
    /// Whether that place can be written.
    pub writable: bool,
    /// The nearest folder that exists.
    pub nearest_folder: String,
    /// Memory that programs can still have.
    pub memory_bytes: Option<u64>,
    /// The NVIDIA kernel driver's own words.
    pub driver: Option<String>,
    /// GPUs.
    pub gpus: Vec<GpuSample>,
}

/// Looks.
///
/// # Errors
/// When the chain does not lead there, changes arguments, or tools are missing.
pub fn probe(far: &Far, folder: &str) -> Result<Probe, RemoteError> {
    let answer = far.script("looking at it", SCRIPT, &[folder, NASTY, TOOLS], Input::Nothing)?;
    let all = |key: &str| -> Vec<&str> {
        let prefix = format!("{key}=");
        answer.out.lines().filter_map(|l| l.strip_prefix(&prefix)).map(str::trim).filter(|v| !v.is_empty()).collect()
    };
    let one = |key: &str| all(key).last().map(|v| (*v).to_owned());
    let got = one("args").unwrap_or_default();
    if got != NASTY {
        return Err(RemoteError::Garbled { place: far.place(), sent: NASTY.into(), got });
    }
    let missing = all("missing");
    if !missing.is_empty() {
        return Err(RemoteError::NoTools { place: far.place(), tools: missing.join(", ") });
    }
    let libc = one("libc");
    let kib = |key: &str| one(key).and_then(|v| v.parse::<u64>().ok()).map(|k| k << 10);
    Ok(Probe {
        host: one("host"),
        system: one("system"),
        machine: one("machine"),
        glibc: libc.as_deref().and_then(glibc_of),
        libc,
        free_bytes: kib("free"),
        writable: one("writable").is_some(),
        nearest_folder: one("parent").unwrap_or_default(),
        memory_bytes: kib("memory"),
        driver: one("driver"),
        gpus: parse_gpus(&all("gpu").join("\n")),
    })
}

/// `2.36` of `glibc 2.36` or of `ldd (Debian GLIBC 2.36-9) 2.36`; none for other libraries.
fn glibc_of(words: &str) -> Option<String> {
    let glibc = words.to_lowercase().contains("glibc") || words.contains("GNU libc");
    words.split_whitespace().last().filter(|v| glibc && version(v) > (0, 0)).map(str::to_owned)
}

fn version(text: &str) -> (u32, u32) {
    let mut parts = text.split('.').map(|p| p.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

/// What a binary needs of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Needs {
    /// As `uname -m` says it; none if the file is no ELF program.
    pub machine: Option<String>,
    /// Newest glibc that it names, e.g. `2.34`; none when it is linked statically.
    pub glibc: Option<String>,
}

/// Reads what `binary` needs from its ELF header and the versions that it names.
///
/// # Errors
/// When it cannot be read.
pub fn needs(binary: &Path) -> Result<Needs, RemoteError> {
    let bytes = std::fs::read(binary).map_err(RemoteError::io("read", binary))?;
    if !bytes.starts_with(b"\x7fELF") || bytes.len() < 20 {
        return Ok(Needs::default());
    }
    let machine = match u16::from_le_bytes([bytes[18], bytes[19]]) {
        62 => Some("x86_64".to_owned()),
        183 => Some("aarch64".to_owned()),
        other => Some(format!("ELF machine {other}")),
    };
    let mark = b"GLIBC_2.";
    let minor = |at: usize| -> Option<u32> {
        let digits: Vec<u8> = bytes[at + mark.len()..].iter().copied().take_while(u8::is_ascii_digit).take(3).collect();
        String::from_utf8(digits).ok()?.parse().ok()
    };
    let newest = bytes.windows(mark.len()).enumerate().filter(|(_, w)| w == mark).filter_map(|(at, _)| minor(at)).max();
    Ok(Needs { machine, glibc: newest.map(|m| format!("2.{m}")) })
}

/// Whether a binary with these needs runs there, and a config that wants GPUs finds them.
///
/// # Errors
/// What is missing, each in its own words.
pub fn fits(far: &Far, probe: &Probe, needs: &Needs, wants_gpus: bool) -> Result<(), RemoteError> {
    let place = far.place();
    if let (Some(ours), Some(theirs)) = (&needs.machine, &probe.machine)
        && ours != theirs
    {
        return Err(RemoteError::WrongArchitecture { place, ours: ours.clone(), theirs: theirs.clone() });
    }
    if let (Some(needs), Some(has)) = (&needs.glibc, &probe.glibc)
        && version(needs) > version(has)
    {
        return Err(RemoteError::OldGlibc { place, needs: needs.clone(), has: has.clone() });
    }
    if wants_gpus && probe.driver.is_none() && probe.gpus.is_empty() {
        return Err(RemoteError::NoDriver { place });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chain::Chain;

    fn here() -> Far {
        Far::new(Chain::default(), Default::default())
    }

    #[test]
    fn this_machine_is_seen() {
        let probe = probe(&here(), "/tmp/no/such/folder").unwrap();
        assert_eq!((probe.nearest_folder.as_str(), probe.writable), ("/tmp", true));
        assert_eq!(probe.machine.as_deref(), Some(std::env::consts::ARCH));
        assert!(probe.free_bytes.unwrap() > 0 && probe.memory_bytes.unwrap() > 0);
        fits(&here(), &probe, &needs(&std::env::current_exe().unwrap()).unwrap(), false).unwrap();
    }

    #[test]
    fn what_does_not_fit_is_said_apart() {
        let probe = Probe { machine: Some("aarch64".into()), glibc: Some("2.31".into()), ..Probe::default() };
        let told = |needs: Needs, gpus| fits(&here(), &probe, &needs, gpus).unwrap_err().to_string();
        let needs = |machine: &str, glibc: &str| Needs { machine: Some(machine.into()), glibc: Some(glibc.into()) };
        assert!(told(needs("x86_64", "2.17"), false).contains("built for x86_64"));
        assert!(told(needs("aarch64", "2.34"), false).contains("needs glibc 2.34"));
        assert!(told(needs("aarch64", "2.4"), true).contains("NVIDIA driver"));
        fits(&here(), &probe, &needs("aarch64", "2.4"), false).unwrap();
    }

    #[test]
    fn libraries_name_themselves() {
        let cases =
            [("glibc 2.36", Some("2.36")), ("ldd (Debian GLIBC 2.31-13) 2.31", Some("2.31")), ("musl libc (x86_64)", None)];
        for (words, version) in cases {
            assert_eq!(glibc_of(words).as_deref(), version, "{words}");
        }
    }
}
