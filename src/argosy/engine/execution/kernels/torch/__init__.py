"""Operations in plain torch, which run anywhere and define what the other kernels compute."""
