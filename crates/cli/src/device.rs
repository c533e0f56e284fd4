//! Which device a command computes on: `cpu`, `cuda` or `cuda:N`.
//!
//! Job: read `--device`, open its backend, and let a command's body be written once for both. Refuses to fall back: a device that is not there ends the
//! command (exit 5). Invariant: a build without the `cuda` feature names the feature when it is asked for a GPU.

use crate::exit::Failure;
use drafthorse_train::frozen::CpuBackend;
use std::str::FromStr;
use std::time::Duration;

/// Longest wait for a device where no run config says another.
pub const DEADLINE: Duration = Duration::from_secs(300);

/// A device as the user names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The CPU, in f32.
    Cpu,
    /// This GPU, in bf16.
    Cuda(u32),
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Device, String> {
        match text.split_once(':') {
            None if text == "cpu" => Ok(Device::Cpu),
            None if text == "cuda" => Ok(Device::Cuda(0)),
            Some(("cuda", index)) => {
                index.parse().map(Device::Cuda).map_err(|_| format!("`{index}` is no GPU number: write cuda:0"))
            }
            _ => Err(format!("`{text}` is no device: use cpu, cuda or cuda:N")),
        }
    }
}

impl Device {
    /// The number that a backend's executors are asked for.
    pub fn index(self) -> u32 {
        match self {
            Device::Cpu => 0,
            Device::Cuda(index) => index,
        }
    }
}

/// The backend of a device.
pub enum Opened {
    /// The CPU's.
    Cpu(CpuBackend),
    /// All GPUs'.
    #[cfg(feature = "cuda")]
    Cuda(drafthorse_train::cuda::CudaBackend),
}

/// Opens a device's backend. `threads` are the CPU's compute threads (all cores when absent), `deadline` bounds each wait for a GPU.
///
/// # Errors
/// Exit 5 when it cannot be had, naming what is missing.
pub fn open(device: Device, threads: Option<usize>, deadline: Duration) -> Result<Opened, Failure> {
    match device {
        Device::Cpu => Ok(Opened::Cpu(CpuBackend::new(threads)?)),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => {
            use drafthorse_train::cuda::{CudaBackend, SearchPaths};
            let paths = SearchPaths::usual(|name| std::env::var_os(name));
            Ok(Opened::Cuda(CudaBackend::new(&paths, machine_table(), deadline)?))
        }
        #[cfg(not(feature = "cuda"))]
        Device::Cuda(_) => {
            let _ = deadline;
            Err(Failure::new(
                crate::exit::Exit::Device,
                "a GPU is asked for, and this build has the cpu backend only",
                "use cpu, or a program built with `--features cuda`",
            ))
        }
    }
}

/// The algorithms that this user's programs chose on this machine before; what is timed anew is added to them. So two runs agree to the bit.
#[cfg(feature = "cuda")]
fn machine_table() -> drafthorse_train::cuda::AlgorithmTable {
    use crate::screen::tell;
    use std::io::Write;
    let table = drafthorse_train::cuda::AlgorithmTable::default();
    let cache = std::env::var_os("XDG_CACHE_HOME").map(std::path::PathBuf::from);
    let Some(folder) = cache.or_else(|| std::env::var_os("HOME").map(|h| std::path::Path::new(&h).join(".cache"))) else {
        tell("note: neither XDG_CACHE_HOME nor HOME is set: chosen algorithms are not kept, and another run may choose others");
        return table;
    };
    let path = folder.join("drafthorse").join("algorithms.tsv");
    if let Ok(text) = std::fs::read_to_string(&path)
        && let Err(why) = table.adopt(&text)
    {
        tell(format!("note: {} is not used ({why}): products are timed anew", path.display()));
        let _ = std::fs::remove_file(&path);
    }
    let open = move || {
        std::fs::create_dir_all(path.parent().expect("it was joined above"))?;
        std::fs::File::options().create(true).append(true).open(&path)
    };
    table.telling(move |line| {
        if let Err(e) = open().and_then(|mut f| f.write_all(line.as_bytes())) {
            tell(format!("note: a chosen algorithm is not kept ({e}): another run may choose another"));
        }
    })
}

/// Runs a body with `$backend` bound to the opened backend, whichever it is.
macro_rules! on {
    ($opened:expr, $backend:ident => $body:expr) => {
        match $opened {
            crate::device::Opened::Cpu($backend) => $body,
            #[cfg(feature = "cuda")]
            crate::device::Opened::Cuda($backend) => $body,
        }
    };
}
pub(crate) use on;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        assert_eq!("cpu".parse(), Ok(Device::Cpu));
        assert_eq!("cuda".parse(), Ok(Device::Cuda(0)));
        assert_eq!("cuda:3".parse(), Ok(Device::Cuda(3)));
        for wrong in ["gpu", "cuda:", "cuda:x", "cpu:0", ""] {
            assert!(wrong.parse::<Device>().is_err(), "{wrong}");
        }
    }
}
