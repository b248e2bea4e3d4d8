//! Scalar functions over tensor columns. Values are read as f64; a null tensor gives null.
//!
//! A tensor is a list of floats, or binary whose column says its `dtype` (bf16, f16, f32, little endian).

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, BooleanArray, Float64Array};
use arrow::datatypes::{DataType, Field, FieldRef, Float16Type, Float32Type, Float64Type};
use datafusion::common::{exec_err, plan_err};
use datafusion::error::Result;
use datafusion::logical_expr::{
    ColumnarValue, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility,
};
use half::{bf16, f16};

/// All functions.
pub(crate) fn functions() -> Vec<ScalarUDF> {
    ALL.iter().map(|&kind| ScalarUDF::from(Function { kind, signature: kind.signature() })).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    /// Mean of the values.
    Mean,
    /// Standard deviation over the values, as numpy's default (divided by their number).
    Std,
    /// Euclidean norm.
    Norm,
    /// Least value; NaN if there is one.
    Min,
    /// Greatest value; NaN if there is one.
    Max,
    /// Number of values.
    Len,
    /// Whether any value is NaN.
    HasNan,
    /// Cosine of the angle between two tensors of one length; null if one is all zero.
    Cosine,
}

const ALL: [Kind; 8] = [Kind::Mean, Kind::Std, Kind::Norm, Kind::Min, Kind::Max, Kind::Len, Kind::HasNan, Kind::Cosine];

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Mean => "tensor_mean",
            Self::Std => "tensor_std",
            Self::Norm => "tensor_norm",
            Self::Min => "tensor_min",
            Self::Max => "tensor_max",
            Self::Len => "tensor_len",
            Self::HasNan => "has_nan",
            Self::Cosine => "cosine",
        }
    }

    fn signature(self) -> Signature {
        Signature::any(if self == Self::Cosine { 2 } else { 1 }, Volatility::Immutable)
    }

    fn apply(self, x: &[f64]) -> Option<f64> {
        let n = x.len() as f64;
        let extreme = |pick: fn(f64, f64) -> f64| {
            x.iter().copied().reduce(|a, b| if a.is_nan() || b.is_nan() { f64::NAN } else { pick(a, b) })
        };
        let mean = || x.iter().sum::<f64>() / n;
        match self {
            Self::Len => Some(n),
            Self::Norm => Some(x.iter().map(|v| v * v).sum::<f64>().sqrt()),
            Self::Mean => (!x.is_empty()).then(mean),
            Self::Std => (!x.is_empty()).then(|| {
                let mean = mean();
                (x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n).sqrt()
            }),
            Self::Min => extreme(f64::min),
            Self::Max => extreme(f64::max),
            Self::HasNan | Self::Cosine => None,
        }
    }
}

fn cosine(x: &[f64], y: &[f64]) -> Option<f64> {
    let dot: f64 = x.iter().zip(y).map(|(a, b)| a * b).sum();
    let norms = [x, y].map(|x| x.iter().map(|v| v * v).sum::<f64>().sqrt());
    (norms[0] != 0.0 && norms[1] != 0.0).then(|| dot / (norms[0] * norms[1]))
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Function {
    kind: Kind,
    signature: Signature,
}

impl ScalarUDFImpl for Function {
    fn name(&self) -> &str {
        self.kind.name()
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _: &[DataType]) -> Result<DataType> {
        Ok(match self.kind {
            Kind::HasNan => DataType::Boolean,
            Kind::Len => DataType::Int64,
            _ => DataType::Float64,
        })
    }

    fn return_field_from_args(&self, args: ReturnFieldArgs<'_>) -> Result<FieldRef> {
        for field in args.arg_fields {
            if let Err(why) = Encoding::of(field) {
                return plan_err!("`{}` cannot read `{}`: {why}", self.name(), field.name());
            }
        }
        Ok(Arc::new(Field::new(self.name(), self.return_type(&[])?, true)))
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let rows = args.number_rows;
        let columns: Vec<ArrayRef> = args.args.iter().map(|arg| arg.to_array(rows)).collect::<Result<_>>()?;
        let mut tensors = Vec::new();
        for (column, field) in columns.iter().zip(&args.arg_fields) {
            match Encoding::of(field) {
                Ok(encoding) => tensors.push(Tensors { column, encoding }),
                Err(why) => return exec_err!("`{}` cannot read `{}`: {why}", self.name(), field.name()),
            }
        }
        let row = |i: usize| -> Result<Vec<Option<Vec<f64>>>> {
            let read = |t: &Tensors<'_>| t.get(i).or_else(|why| exec_err!("`{}`: {why}", self.name()));
            tensors.iter().map(read).collect()
        };
        let first = |i: usize| row(i).map(|mut row| row.swap_remove(0));
        let result: ArrayRef = match self.kind {
            Kind::HasNan => {
                let has_nan = |i| Ok(first(i)?.map(|x| x.iter().any(|v| v.is_nan())));
                Arc::new((0..rows).map(has_nan).collect::<Result<BooleanArray>>()?)
            }
            Kind::Len => {
                let len = |i| Ok(first(i)?.map(|x| x.len() as i64));
                Arc::new((0..rows).map(len).collect::<Result<arrow::array::Int64Array>>()?)
            }
            Kind::Cosine => {
                let pair = |i| {
                    let row = row(i)?;
                    let (Some(x), Some(y)) = (&row[0], &row[1]) else { return Ok(None) };
                    if x.len() != y.len() {
                        return exec_err!("`cosine` of tensors of {} and {} values", x.len(), y.len());
                    }
                    Ok(cosine(x, y))
                };
                Arc::new((0..rows).map(pair).collect::<Result<Float64Array>>()?)
            }
            kind => {
                let value = |i| Ok(first(i)?.and_then(|x| kind.apply(&x)));
                Arc::new((0..rows).map(value).collect::<Result<Float64Array>>()?)
            }
        };
        Ok(ColumnarValue::Array(result))
    }
}

/// How a column holds tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encoding {
    List,
    Bf16,
    F16,
    F32,
    /// A column of nulls.
    Nothing,
}

impl Encoding {
    pub(crate) fn of(field: &Field) -> Result<Self, String> {
        let float =
            |item: &Field| matches!(item.data_type(), DataType::Float16 | DataType::Float32 | DataType::Float64);
        match field.data_type() {
            DataType::Null => Ok(Self::Nothing),
            DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) if float(item) => {
                Ok(Self::List)
            }
            DataType::Binary | DataType::LargeBinary | DataType::BinaryView => {
                match field.metadata().get("dtype").map(String::as_str) {
                    Some("bf16") => Ok(Self::Bf16),
                    Some("f16") => Ok(Self::F16),
                    Some("f32") => Ok(Self::F32),
                    Some(other) => Err(format!("its `dtype` is `{other}`, not `bf16`, `f16` or `f32`")),
                    None => {
                        Err("it is binary, and no `dtype` in the column's metadata says what its numbers are".into())
                    }
                }
            }
            other => Err(format!("it is `{other}`, not a list of floats nor binary with a `dtype`")),
        }
    }

    pub(crate) fn dtype(self) -> Option<&'static str> {
        match self {
            Self::Bf16 => Some("bf16"),
            Self::F16 => Some("f16"),
            Self::F32 => Some("f32"),
            Self::List | Self::Nothing => None,
        }
    }
}

/// A column of tensors.
pub(crate) struct Tensors<'a> {
    pub(crate) column: &'a dyn Array,
    pub(crate) encoding: Encoding,
}

impl Tensors<'_> {
    /// The values of row `i`; `None` for null.
    pub(crate) fn get(&self, i: usize) -> Result<Option<Vec<f64>>, String> {
        if self.encoding == Encoding::Nothing || self.column.is_null(i) {
            return Ok(None);
        }
        let bytes = || match self.column.data_type() {
            DataType::LargeBinary => self.column.as_binary::<i64>().value(i),
            DataType::BinaryView => self.column.as_binary_view().value(i),
            _ => self.column.as_binary::<i32>().value(i),
        };
        match self.encoding {
            Encoding::Nothing => Ok(None),
            Encoding::List => floats(&self.list(i)).map(Some),
            Encoding::Bf16 => numbers(bytes(), |b| bf16::from_le_bytes(b).to_f64()).map(Some),
            Encoding::F16 => numbers(bytes(), |b| f16::from_le_bytes(b).to_f64()).map(Some),
            Encoding::F32 => numbers(bytes(), |b| f64::from(f32::from_le_bytes(b))).map(Some),
        }
    }

    fn list(&self, i: usize) -> ArrayRef {
        match self.column.data_type() {
            DataType::LargeList(_) => self.column.as_list::<i64>().value(i),
            DataType::FixedSizeList(..) => self.column.as_fixed_size_list().value(i),
            _ => self.column.as_list::<i32>().value(i),
        }
    }
}

fn numbers<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f64) -> Result<Vec<f64>, String> {
    let (chunks, rest) = bytes.as_chunks::<N>();
    if rest.is_empty() {
        Ok(chunks.iter().map(|chunk| number(*chunk)).collect())
    } else {
        Err(format!("{} bytes are no whole number of {N}-byte values", bytes.len()))
    }
}

fn floats(values: &ArrayRef) -> Result<Vec<f64>, String> {
    if values.null_count() > 0 {
        return Err("the tensor holds a null".into());
    }
    Ok(match values.data_type() {
        DataType::Float16 => values.as_primitive::<Float16Type>().values().iter().map(|v| v.to_f64()).collect(),
        DataType::Float32 => values.as_primitive::<Float32Type>().values().iter().map(|v| f64::from(*v)).collect(),
        _ => values.as_primitive::<Float64Type>().values().to_vec(),
    })
}
