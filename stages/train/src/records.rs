//! The tables of a run: `steps`, `losses`, `validation`. Rows are kept in memory and written whole before each checkpoint,
//! so a checkpoint never exists without the rows that lead to it; a resumed run drops the rows after its checkpoint.

use std::collections::BTreeMap;
use std::path::Path;

use stage::Failure;
use tables::{Loss, Row, Step, Validation};

/// Rows so far.
#[derive(Debug, Default)]
pub(crate) struct Records {
    pub(crate) steps: Vec<Step>,
    pub(crate) losses: Vec<Loss>,
    pub(crate) validation: Vec<Validation>,
}

impl Records {
    /// What `folder` holds of the first `steps` steps.
    pub(crate) fn restore(folder: &Path, steps: u64) -> Result<Self, Failure> {
        let done = |step: i64| u64::try_from(step).is_ok_and(|step| step < steps);
        let mut records = Self {
            steps: read(&folder.join("steps.parquet"))?,
            losses: read(&folder.join("losses.parquet"))?,
            validation: read(&folder.join("validation.parquet"))?,
        };
        records.steps.retain(|row: &Step| done(row.step));
        records.losses.retain(|row: &Loss| done(row.step));
        records.validation.retain(|row: &Validation| done(row.step));
        Ok(records)
    }

    /// Step → mean of the losses of its validation.
    pub(crate) fn validation_means(&self) -> BTreeMap<u64, f64> {
        let mut sums: BTreeMap<u64, (f64, u32)> = BTreeMap::new();
        for row in &self.validation {
            let (sum, count) = sums.entry(row.step as u64).or_default();
            (*sum, *count) = (*sum + row.loss, *count + 1);
        }
        sums.into_iter().map(|(step, (sum, count))| (step, sum / f64::from(count))).collect()
    }

    /// Writes all three tables; each appears whole or not at all.
    pub(crate) fn write(&self, folder: &Path) -> Result<(), Failure> {
        write(&folder.join("steps.parquet"), &self.steps)?;
        write(&folder.join("losses.parquet"), &self.losses)?;
        write(&folder.join("validation.parquet"), &self.validation)
    }
}

fn read<R: Row>(path: &Path) -> Result<Vec<R>, Failure> {
    if path.exists() { tables::read(path).map_err(Failure::from_diagnostic) } else { Ok(Vec::new()) }
}

fn write<R: Row + Clone>(path: &Path, rows: &[R]) -> Result<(), Failure> {
    tables::write(path, rows.iter().cloned()).map_err(Failure::from_diagnostic)?;
    Ok(())
}
