//! Devices by name, with CUDA's half of libtorch loaded on demand, and process-wide switches.
//!
//! libtorch decides at the first CUDA query whether there is CUDA at all. So every query of the workspace goes through here,
//! after the loading.

use std::env;
use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tch::Device;

use crate::error::{Error, Result};
use crate::ffi;

/// The libtorch that tch's generated bindings fit.
pub const LIBTORCH_VERSION: &str = "2.11.0";

const CUDA_LIBRARY: &str = "libtorch_cuda.so";

/// Process groups over NCCL.
const NCCL_LIBRARY: &str = "libpipeline_nccl.so";

static CUDA: Mutex<Option<PathBuf>> = Mutex::new(None);

/// `cpu`, `cuda` (the same as `cuda:0`) or `cuda:N`, checked to be usable. Loads CUDA when asked for it; see [`load_cuda`]. A GPU
/// becomes the current one of this thread.
pub fn resolve(name: &str) -> Result<Device> {
    let index = match name.split_once(':') {
        None if name == "cpu" => {
            crate::memory::pool();
            return Ok(Device::Cpu);
        }
        None if name == "cuda" => 0,
        Some(("cuda", digits)) => digits.parse::<u16>().map_err(|_| Error::UnknownDevice(name.to_owned()))?,
        _ => return Err(Error::UnknownDevice(name.to_owned())),
    };
    load_cuda(name, None)?;
    match count() {
        0 => Err(Error::NoGpu { device: name.to_owned() }),
        count if i64::from(index) >= count => Err(Error::NoSuchGpu { device: name.to_owned(), count }),
        _ => {
            // SAFETY: a device that there is.
            ffi::status(unsafe { ffi::shim_cuda_use(c_int::from(index)) })?;
            Ok(Device::Cuda(usize::from(index)))
        }
    }
}

/// GPUs that can be used; 0 if CUDA is not installed or no driver answers.
pub fn gpus() -> usize {
    if load_cuda("cuda", None).is_err() { 0 } else { usize::try_from(count()).unwrap_or(0) }
}

#[expect(clippy::disallowed_methods, reason = "the one place that asks, and only after `load_cuda`")]
fn count() -> i64 {
    tch::Cuda::device_count()
}

/// Loads libtorch_cuda.so, once per process, from the first of: `hint`, the variable LIBTORCH_CUDA, the folder of the
/// libtorch in use. The first two may name the file, its folder, or an installed Python `torch` folder.
pub fn load_cuda(device: &str, hint: Option<&Path>) -> Result<PathBuf> {
    let mut loaded = CUDA.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(path) = loaded.as_ref() {
        return Ok(path.clone());
    }
    let variable = env::var_os("LIBTORCH_CUDA").filter(|value| !value.is_empty()).map(PathBuf::from);
    let candidates: Vec<_> = (hint.map(Path::to_path_buf).iter())
        .chain(variable.iter())
        .flat_map(|place| [place.clone(), place.join(CUDA_LIBRARY), place.join("lib").join(CUDA_LIBRARY)])
        .chain(libtorch_folder().map(|folder| folder.join(CUDA_LIBRARY)))
        .collect();
    let Some(path) = candidates.iter().find(|path| path.is_file()) else {
        let looked = candidates.iter().map(|path| format!("`{}`", path.display())).collect::<Vec<_>>().join(", ");
        return Err(Error::NoCudaLibrary { device: device.to_owned(), looked });
    };
    let name = ffi::c_string(&path.to_string_lossy());
    // SAFETY: dlopen of a library whose initialisers only register CUDA with the libtorch already loaded.
    if unsafe { ffi::shim_load(name.as_ptr()) } != 0 {
        return Err(Error::Load { path: path.clone(), reason: ffi::failure() });
    }
    // SAFETY: sets two flags of libtorch's global context.
    ffi::status(unsafe { ffi::shim_forbid_tf32() })?;
    Ok(loaded.insert(path.clone()).clone())
}

/// Loads libpipeline_nccl.so, by which GPUs of several processes talk to each other, from the folder of libtorch_cuda.so or that
/// of the libtorch in use; `scripts/build-nccl.sh` makes it.
pub fn load_nccl(device: &str) -> Result<()> {
    let cuda = load_cuda(device, None)?;
    let folders = [cuda.parent().map(Path::to_path_buf), libtorch_folder()];
    let candidates: Vec<_> = folders.into_iter().flatten().map(|folder| folder.join(NCCL_LIBRARY)).collect();
    let Some(path) = candidates.iter().find(|path| path.is_file()) else {
        let looked = candidates.iter().map(|path| format!("`{}`", path.display())).collect::<Vec<_>>().join(", ");
        return Err(Error::NoNcclLibrary { looked });
    };
    let name = ffi::c_string(&path.to_string_lossy());
    // SAFETY: dlopen of a library without initialisers, on top of the libtorch_cuda.so just loaded.
    if unsafe { ffi::shim_load(name.as_ptr()) } != 0 {
        return Err(Error::Load { path: path.clone(), reason: ffi::failure() });
    }
    Ok(())
}

/// Where this process's libtorch_cpu.so lies, read from its memory map.
pub fn libtorch_folder() -> Option<PathBuf> {
    let maps = fs_err::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| line.ends_with("/libtorch_cpu.so"))?;
    Path::new(&line[line.find('/')?..]).parent().map(Path::to_path_buf)
}

/// Whether bf16 arithmetic runs in hardware there. Elsewhere it is emulated and slower than f32.
pub fn native_bf16(device: Device) -> bool {
    match device {
        Device::Cuda(_) => true,
        Device::Cpu => cpu_has_bf16(),
        _ => false,
    }
}

#[cfg(target_arch = "x86_64")]
fn cpu_has_bf16() -> bool {
    // AMX-BF16: leaf 7.0, EDX bit 22. The system grants its registers on first use, so the CPU's word is enough.
    let amx = std::arch::x86_64::__cpuid_count(7, 0).edx >> 22 & 1 == 1;
    std::is_x86_feature_detected!("avx512bf16") || amx
}

#[cfg(not(target_arch = "x86_64"))]
fn cpu_has_bf16() -> bool {
    false
}

/// Threads that one operator may use.
pub fn set_threads(count: usize) {
    tch::set_num_threads(i32::try_from(count.max(1)).unwrap_or(i32::MAX));
}

/// Threads that one operator may use.
pub fn threads() -> usize {
    usize::try_from(tch::get_num_threads()).unwrap_or(1)
}

/// Refuses operators that have no deterministic implementation and stops cuDNN from choosing kernels by timing.
pub fn set_deterministic(on: bool) -> Result<()> {
    // SAFETY: sets flags of libtorch's global context.
    ffi::status(unsafe { ffi::shim_deterministic(c_int::from(on)) })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_resolve_or_say_what_is_possible() {
        assert_eq!(resolve("cpu").unwrap(), Device::Cpu);
        for name in ["gpu", "cuda:", "cuda:x", "cuda:-1", "mps", "", "cpu:0"] {
            assert_eq!(resolve(name).unwrap_err().to_string(), format!("unknown device `{name}`"));
        }
    }

    #[test]
    fn missing_cuda_names_where_it_was_sought() {
        if gpus() > 0 {
            return; // covered only where there is no GPU
        }
        let error = resolve("cuda").unwrap_err().to_string();
        let beside = libtorch_folder().unwrap().join(CUDA_LIBRARY);
        if beside.exists() || env::var_os("LIBTORCH_CUDA").is_some() {
            assert!(error.contains("GPU answers") || error.contains("cannot load"), "{error}");
        } else {
            assert!(error.contains(&beside.display().to_string()), "{error}");
        }
    }

    #[test]
    fn a_file_that_is_no_library_is_refused_by_name() {
        let folder = env::temp_dir().join(format!("torch-device-{}", std::process::id()));
        fs_err::create_dir_all(folder.join("lib")).unwrap();
        let fake = folder.join("lib").join(CUDA_LIBRARY);
        fs_err::write(&fake, "not an ELF file").unwrap();
        let outcome = load_cuda("cuda", Some(&folder));
        fs_err::remove_dir_all(&folder).unwrap();
        if CUDA.lock().unwrap().as_ref().is_some_and(|path| *path != fake) {
            return; // another test had loaded the real one
        }
        assert!(matches!(outcome, Err(Error::Load { path, .. }) if path == fake));
    }
}
