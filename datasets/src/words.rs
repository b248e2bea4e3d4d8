//! Words for place and light that all data sets share.

/// Where something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Sea,
    Hills,
    Mountains,
    Terrace,
    Snow,
    Desert,
}

impl Place {
    pub(crate) const ALL: [Self; 6] =
        [Self::Sea, Self::Hills, Self::Mountains, Self::Terrace, Self::Snow, Self::Desert];

    /// As a caption words it.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Sea => "by the sea",
            Self::Hills => "in the hills",
            Self::Mountains => "in the mountains",
            Self::Terrace => "on a terrace",
            Self::Snow => "in the snow",
            Self::Desert => "in the desert",
        }
    }
}

/// When it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Light {
    Morning,
    Noon,
    Sunset,
    Night,
}

impl Light {
    pub(crate) const ALL: [Self; 4] = [Self::Morning, Self::Noon, Self::Sunset, Self::Night];

    /// As a caption words it.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Morning => "in the morning",
            Self::Noon => "at noon",
            Self::Sunset => "at sunset",
            Self::Night => "at night",
        }
    }
}
